"""Differences between Ollama's own tokenizer and the model's, which is right. One test for each.

Ollama's (`x/tokenizer`) reads only BPE, knows no normalizer, and takes one regular expression, rewritten for Go, for
all pre-tokenizers.
"""

import json
from collections.abc import Sequence

import pytest

from runner.errors import ModelError
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, document, sentencepiece, spell

Json = dict[str, object]

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load(made: Json, **configs: Json) -> Tokenizer:
    files = {f"{name}.json": json.dumps(value).encode() for name, value in configs.items()}
    files["tokenizer.json"] = json.dumps(made).encode()
    return open_tokenizer(files.get)


def byte_pairs(*longer: bytes, **parts: object) -> Json:
    return {**byte_level([*ALL_BYTES, *longer], split=LLAMA3_SPLIT), **parts}


def with_model(made: Json, **changes: object) -> Json:
    model = made["model"]
    assert isinstance(model, dict)
    return {**made, "model": {**model, **changes}}


def pieces(tokenizer: Tokenizer, text: str) -> Sequence[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]


def test_the_models_normalizer_is_applied() -> None:
    """Ollama: none. Qwen's NFC, Llama 2's first space, Gemma's marks for spaces."""
    accent = "e\N{COMBINING ACUTE ACCENT}"
    assert pieces(load(byte_pairs("é".encode(), normalizer={"type": "NFC"})), accent) == ["é".encode()]
    assert pieces(load(sentencepiece(["h", " ", " h"], prepend_space=True)), "h") == [b" h"]


def test_every_pre_tokenizer_is_applied_as_it_stands() -> None:
    """Ollama: the first Split that Go can compile; GPT-2's pattern where there is none."""
    digits: Json = {"type": "Digits", "individual_digits": True}
    byte_step: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    first: Json = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
    steps: Json = {"type": "Sequence", "pretokenizers": [first, digits, byte_step]}
    assert pieces(load(byte_pairs(b"12", b"xy", pre_tokenizer=steps)), "12xy") == [b"1", b"2", b"xy"]
    assert pieces(load(byte_pairs(b"x y", b" y", pre_tokenizer=byte_step)), "x y") == [b"x y"]
    prefix: Json = {**byte_step, "add_prefix_space": True}
    assert pieces(load(byte_pairs(b" x", pre_tokenizer=prefix)), "x") == [b" x"]


def test_white_space_before_digits_is_cut_by_the_models_look_ahead() -> None:
    """Ollama keeps such a run whole: Go's expressions cannot look ahead."""
    tokenizer = load(byte_pairs(b"  ", b"   ", b"\n\n"))
    assert pieces(tokenizer, "   1") == [b"  ", b" ", b"1"]


def test_white_space_is_unicodes() -> None:
    """Ollama: in Go's expressions `\\s` is ASCII, so a no-break space counts as a sign."""
    nbsp = "\u00a0".encode()
    tokenizer = load(byte_pairs(nbsp, nbsp + b"!"))
    assert pieces(tokenizer, "\u00a0!") == [nbsp, b"!"]


def test_text_that_the_pattern_does_not_match_is_kept() -> None:
    """Ollama drops it."""
    tokenizer = load(byte_level(ALL_BYTES, split="[a-z]+"))
    assert pieces(tokenizer, "a1b") == [b"a", b"1", b"b"]


def test_a_word_of_the_vocabulary_that_no_merges_make_is_taken_only_if_the_model_says_so() -> None:
    """Ollama takes it always, as if `ignore_merges` were true."""
    made = byte_level([*ALL_BYTES, b"abc"])
    assert pieces(load(made), "abc") == [b"a", b"b", b"c"]
    assert pieces(load(with_model(made, ignore_merges=True)), "abc") == [b"abc"]


def test_what_the_vocabulary_lacks_is_the_unknown_token() -> None:
    """Ollama drops it."""
    vocab = {"<unk>": 0, "a": 1}
    made = document({"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"}, decoder={"type": "Fuse"})
    assert load(made).encode("aéa") == [1, 0, 1]


def test_the_prefixes_and_suffixes_of_a_model_are_its_own() -> None:
    """Ollama knows neither."""
    vocab = {"a": 0, "b</w>": 1, "ab</w>": 2}
    model: Json = {"type": "BPE", "vocab": vocab, "merges": [["a", "b</w>"]], "end_of_word_suffix": "</w>"}
    words: Json = {"type": "WhitespaceSplit"}
    made = document(model, pre_tokenizer=words, decoder={"type": "BPEDecoder", "suffix": "</w>"})
    assert pieces(load(made), "ab ab") == [b"ab ", b"ab "]


def test_marks_for_spaces_are_known_from_any_decoder() -> None:
    """Ollama: only from a Sequence with a Replace; it reads a Metaspace vocabulary as bytes."""
    metaspace: Json = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    model: Json = {"type": "BPE", "vocab": {"▁": 0, "a": 1, "▁a": 2}, "merges": [["▁", "a"]]}
    made = document(model, pre_tokenizer=metaspace, decoder=metaspace)
    assert pieces(load(made), "a a") == [b" a", b" a"]


def test_what_is_no_letter_of_the_byte_alphabet_keeps_its_text() -> None:
    """Ollama cuts every character of it down to one byte."""
    fullwidth = "<\uff5ceos\uff5c>"
    assert pieces(load(byte_level(ALL_BYTES, [fullwidth])), fullwidth) == [fullwidth.encode()]
    vocabulary = {spell(byte): index for index, byte in enumerate(ALL_BYTES)} | {"日": 256}
    assert load(with_model(byte_level(), vocab=vocabulary)).token_bytes(256) == "日".encode()


def test_a_special_token_keeps_its_marks() -> None:
    """Ollama shows spaces in their place."""
    made = sentencepiece(["a"], ["<a▁b>"])
    assert pieces(load(made), "<a▁b>") == ["<a▁b>".encode()]


def test_a_piece_that_looks_like_a_byte_is_one_only_where_the_model_falls_back_to_bytes() -> None:
    """Ollama: wherever spaces have marks."""
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]}
    made = document({"type": "BPE", "vocab": {"<0x41>": 0}, "merges": []}, decoder=decoder)
    assert load(made).token_bytes(0) == b"<0x41>"


def test_an_entry_of_the_vocabulary_keeps_its_id_before_an_added_token_of_the_same_text() -> None:
    """Ollama takes the added token's; the log says which."""
    made = {**byte_level(), "added_tokens": [{"id": 300, "content": "a"}]}
    assert load(made).encode("a") == [ord("a")]


@pytest.mark.parametrize("model", ["Unigram", "WordPiece", "WordLevel"])
def test_models_other_than_bpe_are_read(model: str) -> None:
    """Ollama: `unsupported tokenizer type`."""
    options: dict[str, Json] = {
        "Unigram": {"vocab": [["a", 0.0]], "unk_id": 0},
        "WordPiece": {
            "vocab": {"a": 0},
            "unk_token": "a",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 9,
        },
        "WordLevel": {"vocab": {"a": 0}, "unk_token": "a"},
    }
    assert load(document({"type": model, **options[model]})).encode("a") == [0]


def test_ids_that_are_none_are_passed_over() -> None:
    """Ollama: -1 is an end of text, and 2.5 is 2."""
    generation: Json = {"eos_token_id": [-1, 2.5], "bos_token_id": -1}
    tokenizer = load(byte_level(), generation_config=generation, config={"eos_token_id": 7, "bos_token_id": 6})
    assert tokenizer.eos == {7}
    assert tokenizer.bos == 6


@pytest.mark.parametrize("name", ["generation_config", "config", "tokenizer_config"])
def test_a_broken_config_is_refused(name: str) -> None:
    """Ollama does without it: then a model may never end its answer."""
    files = {"tokenizer.json": json.dumps(byte_level()).encode(), f"{name}.json": b"{"}
    with pytest.raises(ModelError, match=rf"^parse tokenizer: {name}\.json: "):
        open_tokenizer(files.get)
