"""A `tokenizer.model` opened through sentencepiece: the same text handling as with a tokenizer.json."""

import json
from typing import Literal

import pytest
from sentencepiece import SentencePieceProcessor

from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, fallback_byte, trained_model, written_model

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


def test_added_tokens_become_their_ids_beyond_the_pieces_and_behind_gaps(caplog: pytest.LogCaptureFixture) -> None:
    size = plain(small()).get_piece_size()
    tokenizer = load(small(), tokenizer_config=decoder(a=size, b=size + 5), added_tokens={"<c>": size + 9})
    assert tokenizer.encode("<a>hello<b><c>") == [size, size - 6, size + 5, size + 9]
    assert tokenizer.vocab_size == size + 10
    gaps = [*range(size + 1, size + 5), *range(size + 6, size + 9), size + 10, -1, 2**40]
    assert [tokenizer.token_bytes(gap) for gap in gaps] == [b""] * len(gaps)
    assert tokenizer.special == {0, 1, 2, size, size + 5}
    assert not caplog.records


@pytest.mark.parametrize("kind", ["user-defined", "control"])
def test_of_overlapping_texts_the_leftmost_longest_matches(kind: str) -> None:
    model = small(("<a", kind), ("<ab>c", kind))
    tokenizer = load(model, tokenizer_config=decoder(ab=700) | {"bos_token": "b><s>"}, added_tokens={"b><s>": 701})
    assert texts(tokenizer, "<ab>c") == ["<ab>c"]
    assert texts(tokenizer, "<ab>h") == ["<ab>", "h"]
    assert texts(tokenizer, "<ah") == ["<a", "h"]
    assert texts(tokenizer, "b><s><s>") == ["b><s>", "<s>"]


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


# Decoding


def test_byte_pieces_are_bytes_and_only_these() -> None:
    tokenizer = load(small())
    assert [tokenizer.token_bytes(3 + value) for value in range(256)] == list(ALL_BYTES)
    without_bytes = written_model([("<unk>", "unknown"), ("<0x41>", "normal"), ("▁a", "normal")])
    assert load(without_bytes).token_bytes(1) == b"<0x41>"


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
