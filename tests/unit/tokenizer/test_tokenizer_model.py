"""A `tokenizer.model` opened through sentencepiece: the same text handling as with a tokenizer.json."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from runner.tokenizer import Tokenizer, open_tokenizer, utf8
from scripts.tools.models.tokenizers import ALL_BYTES, fallback_byte, model_of_bytes, trained_model, written_model
from tests.unit.tokenizer.threads import beats_during

Json = dict[str, object]
Algorithm = Literal["bpe", "unigram"]

BYTE_PIECES = [(fallback_byte(value), "byte") for value in range(256)]
HELLO = [("▁", "normal"), *((text, "normal") for text in ["he", "ll", "hell", "hello", "▁hello", "h", "e", "l", "o"])]
"""Merged in this order."""


def load(model: bytes, *, merge_eos: bool = True, **configs: Json) -> Tokenizer:
    """Opens `model` as tokenizer.model; the keywords are config files by their names without `.json`."""
    files = {f"{name}.json": json.dumps(value).encode() for name, value in configs.items()}
    files["tokenizer.model"] = model
    return open_tokenizer(files.get, merge_eos=merge_eos)


def decoder(**tokens: int) -> Json:
    """Returns a tokenizer_config.json with the given special tokens, spelled as `<name>`."""
    return {"added_tokens_decoder": {str(i): {"content": f"<{name}>", "special": True} for name, i in tokens.items()}}


def small(*pieces: tuple[str, str], dummy_prefix: bool = False) -> bytes:
    """Ids: unknown, `<s>`, `</s>`, the 256 bytes, `pieces`, `HELLO`."""
    first = [("<unk>", "unknown"), ("<s>", "control"), ("</s>", "control")]
    return written_model([*first, *BYTE_PIECES, *pieces, *HELLO], dummy_prefix=dummy_prefix)


def plain(model: bytes) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    return processor


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return utf8.decode(b"".join(map(tokenizer.token_bytes, ids)))


@pytest.mark.parametrize(("algorithm", "kind"), [("bpe", "sentencepiece BPE"), ("unigram", "sentencepiece unigram")])
def test_it_says_what_it_is(algorithm: Algorithm, kind: str) -> None:
    model = trained_model(algorithm, control=("<a>",), user_defined=("[b]",))
    tokenizer = load(model, tokenizer_config=decoder(c=600) | {"add_bos_token": True, "bos_token": "<s>"})
    size = plain(model).get_piece_size()
    assert (tokenizer.file, tokenizer.kind, tokenizer.vocab_size) == ("tokenizer.model", kind, 601)
    assert tokenizer.special == tokenizer.added == {0, 1, 2, 3, 600}
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, frozenset({2}), True)
    assert load(model).vocab_size == size


# Encoding


def test_without_added_tokens_in_the_text_it_is_sentencepiece() -> None:
    for model in (trained_model(), trained_model("unigram")):
        for text in ("hello  world", "日本語 über 1234", " ", "\n\n", "a\0b", "▁hello", "😀"):
            assert load(model).encode(text) == plain(model).encode(text)
    assert load(trained_model()).encode("") == []


def test_control_symbols_and_the_unknown_become_their_ids() -> None:
    tokenizer = load(small(("<|c|>", "control")))
    assert texts(tokenizer, "<s>hello<|c|></s><unk>") == ["<s>", "hello", "<|c|>", "</s>", "<unk>"]
    assert tokenizer.encode("<s><|c|></s><unk>") == [1, 3 + 256, 2, 0]


def test_added_tokens_become_their_ids_beyond_the_pieces_and_behind_gaps(caplog: pytest.LogCaptureFixture) -> None:
    size = plain(small()).get_piece_size()
    tokenizer = load(small(), tokenizer_config=decoder(a=size, b=size + 5), added_tokens={"<c>": size + 9})
    assert tokenizer.encode("<a>hello<b><c>") == [size, size - 6, size + 5, size + 9]
    assert tokenizer.vocab_size == size + 10
    gaps = [*range(size + 1, size + 5), *range(size + 6, size + 9), size + 10, -1, 2**40]
    assert [tokenizer.token_bytes(gap) for gap in gaps] == [b""] * len(gaps)
    assert tokenizer.special == {0, 1, 2, size, size + 5}
    assert not caplog.records


def test_special_tokens_without_an_id_get_that_of_their_piece_or_the_next_one() -> None:
    size = plain(small()).get_piece_size()
    tokenizer = load(small(), special_tokens_map={"additional_special_tokens": ["hello", "<x>"]})
    assert tokenizer.encode("<x>hello") == [size, size - 6]
    assert tokenizer.special == {0, 1, 2, size, size - 6}


def test_user_defined_symbols_become_their_ids_and_cut_no_text() -> None:
    """They are sentencepiece's own: only one space is put before the text."""
    model = small(("[x]", "user-defined"), ("▁▁", "user-defined"), dummy_prefix=True)
    assert texts(load(model), "hello[x]hello  [x]") == [" hello", "[x]", "hello", "  ", "[x]"]


@pytest.mark.parametrize("kind", ["user-defined", "control"])
def test_of_overlapping_texts_the_leftmost_longest_matches(kind: str) -> None:
    model = small(("<a", kind), ("<ab>c", kind))
    tokenizer = load(model, tokenizer_config=decoder(ab=700) | {"bos_token": "b><s>"}, added_tokens={"b><s>": 701})
    assert texts(tokenizer, "<ab>c") == ["<ab>c"]
    assert texts(tokenizer, "<ab>h") == ["<ab>", "h"]
    assert texts(tokenizer, "<ah") == ["<a", "h"]
    assert texts(tokenizer, "b><s><s>") == ["b><s>", "<s>"]


def test_the_flags_that_say_how_to_match_are_not_asked() -> None:
    flags = {"lstrip": True, "rstrip": True, "single_word": True, "normalized": True}
    config: Json = {"added_tokens_decoder": {"500": {"content": "<a>", "special": False, **flags}}}
    assert texts(load(small(), tokenizer_config=config), "hello <a> hello<a>") == ["hello", " ", "<a>", " hello", "<a>"]


def test_the_models_normalizer_is_applied_between_added_tokens_and_not_to_them() -> None:
    model = trained_model(normalization="nmt_nfkc", remove_extra_whitespaces=True)
    tokenizer = load(model, added_tokens={"<\ufb01>": 700, "<fi>": 701})
    assert texts(tokenizer, "<\ufb01>  \uff48\uff45llo   <fi>") == ["<\ufb01>", " hello", "<fi>"]
    assert tokenizer.encode("<\ufb01><fi>") == [700, 701]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, [" hello", "<s>", " hello", "</s>", " ", " hello"]),
        ({"legacy": True}, [" hello", "<s>", " hello", "</s>", " ", " hello"]),
        ({"legacy": False}, [" hello", "<s>", "hello", "</s>", " hello"]),
        ({"add_prefix_space": False}, ["hello", "<s>", "hello", "</s>", " hello"]),
        ({"legacy": False, "add_prefix_space": False}, ["hello", "<s>", "hello", "</s>", " hello"]),
        ({"legacy": None, "add_prefix_space": None}, [" hello", "<s>", " hello", "</s>", " ", " hello"]),
    ],
)
def test_the_space_before_a_text_is_put_where_the_model_was_used_to_it(config: Json, wanted: list[str]) -> None:
    text = "hello<s>hello</s> hello"
    assert texts(load(small(dummy_prefix=True), tokenizer_config=config), text) == wanted
    assert texts(load(small(), tokenizer_config=config), text) == ["hello", "<s>", "hello", "</s>", " hello"]


def test_a_text_that_begins_with_a_special_token_has_no_first_part_to_put_a_space_before() -> None:
    tokenizer = load(small(dummy_prefix=True), tokenizer_config={"legacy": False})
    assert texts(tokenizer, "<s>hello") == ["<s>", "hello"]


def test_bos_comes_in_front_only_where_the_config_asks_for_it() -> None:
    config: Json = {"add_bos_token": True, "bos_token": "<s>"}
    hello = load(small()).encode("hello")
    assert load(small(), tokenizer_config={"bos_token": "<s>"}).encode("hello") == hello
    tokenizer = load(small(), tokenizer_config=config)
    assert tokenizer.encode("hello") == [1, *hello]
    assert tokenizer.encode("<s>hello") == [1, 1, *hello]
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize("text", ["a\ud800b", "\udc80", "\ud83d\ude00", "<s>\udfff<s>"])
def test_a_lone_surrogate_does_no_harm(text: str) -> None:
    tokenizer = load(small())
    clean = text.replace("\ud83d\ude00", "😀")
    for lone in ("\ud800", "\udc80", "\udfff"):
        clean = clean.replace(lone, "\ufffd")
    assert tokenizer.encode(text) == tokenizer.encode(clean)


def test_encoding_lets_other_threads_run() -> None:
    """With the GIL held, this thread would see nothing happen during the whole encoding."""
    tokenizer = load(trained_model())
    text = "hello world, " * 100_000
    ids, during = beats_during(lambda: tokenizer.encode(text))
    assert len(ids) > 200_000
    assert during >= 5


@pytest.mark.parametrize(
    "text",
    ["hello <world, " * 80_000, "<" * 1_000_000, "<unused599 " * 100_000, "hello<s>" * 125_000],
    ids=["words", "<", "beginnings", "parts"],
)
def test_a_megabyte_with_thousands_of_added_tokens_takes_hardly_longer_than_sentencepiece_alone(text: str) -> None:
    model = trained_model()
    tokenizer = load(model, added_tokens={f"<unused{number}>": 500 + number for number in range(6000)})
    processor = plain(model)

    def seconds(encode: Callable[[str], object]) -> float:
        started = time.process_time()
        encode(text)
        return time.process_time() - started

    alone = min(seconds(processor.encode) for _ in range(2))
    assert min(seconds(tokenizer.encode) for _ in range(2)) < 5 * alone + 0.5


# Decoding


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=20))
def test_the_bytes_of_the_tokens_are_the_text(algorithm: Algorithm, text: str) -> None:
    tokenizer = load(trained_model(algorithm, dummy_prefix=False))
    assert text_of(tokenizer, tokenizer.encode(text)) == text


def test_the_space_before_the_first_word_is_part_of_its_token() -> None:
    tokenizer = load(trained_model())
    assert text_of(tokenizer, tokenizer.encode("hello world")) == " hello world"


def test_byte_pieces_are_bytes_and_only_these() -> None:
    tokenizer = load(small())
    assert [tokenizer.token_bytes(3 + value) for value in range(256)] == list(ALL_BYTES)
    without_bytes = written_model([("<unk>", "unknown"), ("<0x41>", "normal"), ("▁a", "normal")])
    assert load(without_bytes).token_bytes(1) == b"<0x41>"


def test_every_kind_of_piece_has_its_text() -> None:
    kinds = ("normal", "control", "user-defined", "unused")
    tokenizer = load(small(*((f"▁{kind}▁", kind) for kind in kinds)))
    assert [tokenizer.token_text(259 + place) for place in range(4)] == [
        " normal ",
        "▁control▁",  # a mark, not text
        " user-defined ",
        " unused ",
    ]
    assert tokenizer.token_text(0) == "<unk>"


def test_a_special_token_stands_for_its_own_text_another_one_is_read_as_a_piece() -> None:
    entries = {"500": {"content": "<▁a▁>", "special": True}, "501": {"content": "▁▁", "special": False}}
    tokenizer = load(small(), tokenizer_config={"added_tokens_decoder": entries})
    assert tokenizer.token_bytes(500) == "<▁a▁>".encode()
    assert tokenizer.token_bytes(501) == b"  "
    assert tokenizer.encode("<▁a▁>") == [500]


# An added token in the place of a piece


def test_an_added_token_takes_the_id_of_another_piece_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """As InternLM does with its unused pieces; the piece's own spelling still leads there."""
    tokenizer = load(
        small(("[UNUSED_1]", "user-defined"), ("[UNUSED_2]", "control")), tokenizer_config=decoder(a=259, b=260)
    )
    assert tokenizer.encode("<a><b>[UNUSED_1]") == [259, 260, 259]
    assert (tokenizer.token_text(259), tokenizer.token_text(260)) == ("<a>", "<b>")
    assert 260 not in tokenizer.encode("[UNUSED_2]")
    assert tokenizer.vocab_size == load(small()).vocab_size + 2
    [record] = caplog.records
    assert record.getMessage() == "added tokens replace other pieces"
    assert record.__dict__["attributes"] == {
        "file": "tokenizer.model",
        "count": 2,
        "id": 259,
        "token": "<a>",
        "piece": "[UNUSED_1]",
    }


def test_an_added_token_gives_a_text_another_id() -> None:
    tokenizer = load(small(), added_tokens={"<s>": 700, "hello": 701})
    assert tokenizer.encode("<s>hello") == [700, 701]
    assert [tokenizer.token_text(token_id) for token_id in (1, 700)] == ["<s>", "<s>"]
    assert tokenizer.special == {0, 2}


def test_pieces_that_are_listed_as_added_tokens_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model = small(("[x]", "user-defined"))
    config: Json = {"added_tokens_decoder": {"259": {"content": "[x]", "special": False}, "1": {"content": "<s>"}}}
    assert load(model, tokenizer_config=config).encode("[x]<s>") == [259, 1]
    assert not caplog.records


# Special ids


def test_the_models_own_ids_count_where_no_config_names_any() -> None:
    assert load(small()).bos == 1
    assert load(small()).eos == {2}
    assert load(small(), config={"eos_token_id": 5}).eos == {2, 5}
    assert load(small(), merge_eos=False, config={"eos_token_id": 5}).eos == {5}
    assert load(small(), merge_eos=False).eos == {2}
    nameless = written_model([("<unk>", "unknown"), *BYTE_PIECES])
    assert load(nameless).bos is None
    assert load(nameless).eos == frozenset()


def test_a_control_symbol_can_be_named_as_bos_and_eos() -> None:
    tokenizer = load(small(("<|end|>", "control")), tokenizer_config={"eos_token": "<|end|>", "bos_token": "<|end|>"})
    assert tokenizer.bos == 259
    assert tokenizer.eos == {259}


def test_a_model_of_bytes_means_what_its_maker_says() -> None:
    tokenizer = load(model_of_bytes([*ALL_BYTES, "こ".encode(), b" word"], ["<|end|>"]))
    text = "Hi there\n\ta é 😀 word"
    assert tokenizer.encode(f"{text}<|end|>") == [*text.encode(), 258]
    assert text_of(tokenizer, [ord(" "), 256, 257]) == " こ word"
