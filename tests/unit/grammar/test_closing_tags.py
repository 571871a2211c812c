"""The closing tag after free text is recognised in any tokenization, as text or as a special token."""

from functools import cache
from itertools import product

import pytest

from runner.tokenizer import Tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.unit.grammar.tags import CLOSING, can_end, led, thinking
from tests.unit.grammar.walks import bits, guide_of, opened, spelled


@cache
def pieces_tokenizer(*, special: bool = False) -> Tokenizer:
    """Returns tokens: bytes, all parts of the closing tag and tokens across its end; or the tag as a special token."""
    tag = CLOSING.encode()
    parts = {tag[start:end] for start in range(len(tag)) for end in range(start + 2, len(tag) + 1)}
    parts |= {b'think>{"', b'>{"a', b">x", b"a</", b"x</think>", b'</think>{"a": ', b"</thinking"}
    vocabulary = [*ALL_BYTES, *sorted(parts - ({tag} if special else set()))]
    named = [CLOSING] if special else []
    return opened(
        byte_level(vocabulary, [*named, "<|end|>"]),
        generation_config={"eos_token_id": len(vocabulary) + len(named)},
    )


@pytest.mark.parametrize("special", [False, True])
def test_free_text_has_no_part_of_a_character_left_at_its_end(special: bool) -> None:
    tokenizer = pieces_tokenizer(special=special)
    guide = guide_of(thinking(CLOSING), tokenizer)
    first, second = "é".encode()
    assert led(guide, tokenizer, [first])
    assert not can_end(guide, tokenizer)
    assert ord("<") not in bits(guide.mask())
    assert led(guide, tokenizer, [second])
    assert can_end(guide, tokenizer)


def spellings(tag: bytes) -> list[list[bytes]]:
    """Yields every way to split it into parts."""
    ways = []
    for cuts in product((False, True), repeat=len(tag) - 1):
        parts, start = [], 0
        for at, cut in enumerate((*cuts, True), start=1):
            if cut:
                parts.append(tag[start:at])
                start = at
        ways.append(parts)
    return ways


def ids_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    special = tokenizer.special
    return {tokenizer.token_bytes(id_): id_ for id_ in range(tokenizer.vocab_size) if id_ not in special}


def test_a_closing_tag_is_seen_however_it_is_cut_into_tokens() -> None:
    tokenizer = pieces_tokenizer()
    ids = ids_of(tokenizer)
    ways = spellings(CLOSING.encode())
    assert len(ways) == 2 ** (len(CLOSING) - 1)
    for way in ways:
        guide = guide_of(thinking(CLOSING), tokenizer)
        assert led(guide, tokenizer, [ord("a"), *(ids[part] for part in way)])
        assert not can_end(guide, tokenizer)
        assert spelled(guide.forced(99), tokenizer) == b'{"a": '


@pytest.mark.parametrize(
    ("tokens", "legal"),
    [
        ([b"x</think>"], True),
        ([b"</", b'think>{"'], True),
        ([b'</think>{"a": '], True),
        ([b"</think", b">x"], False),
        ([b"</thinking"], True),
    ],
)
def test_a_token_may_hold_the_end_of_the_closing_tag_and_what_follows_it(tokens: list[bytes], legal: bool) -> None:
    tokenizer = pieces_tokenizer()
    ids = ids_of(tokenizer)
    guide = guide_of(thinking(CLOSING), tokenizer)
    assert led(guide, tokenizer, [ord("h"), *(ids[token] for token in tokens[:-1])])
    assert (ids[tokens[-1]] in bits(guide.mask())) is legal


def test_a_closing_tag_that_is_a_special_token_is_that_token_and_no_text() -> None:
    tokenizer = pieces_tokenizer(special=True)
    ids = ids_of(tokenizer)
    (tag,) = tokenizer.special - tokenizer.eos
    guide = guide_of(thinking(CLOSING), tokenizer)
    assert led(guide, tokenizer, [ids[b"</think"]])
    assert ids[b">x"] not in bits(guide.mask())
    assert ord(">") not in bits(guide.mask())
    assert led(guide, tokenizer, [ord("!"), tag])
    assert spelled(guide.forced(99), tokenizer) == b'{"a": '
    assert not can_end(guide, tokenizer)


def test_a_closing_tag_that_is_added_but_not_special_is_text() -> None:
    document = byte_level(ALL_BYTES, [CLOSING, "<|end|>"])
    added = document["added_tokens"]
    assert isinstance(added, list)
    added[0]["special"] = False
    tokenizer = opened(document, generation_config={"eos_token_id": 257})
    for spelling in ([256], [*CLOSING.encode()]):
        guide = guide_of(thinking(CLOSING), tokenizer)
        assert led(guide, tokenizer, [ord("a"), *spelling])
        assert spelled(guide.forced(99), tokenizer) == b'{"a": '
