"""Forms of `tokenizer.json`: old, short, with odd ids, without a decoder, broken."""

import json
from collections.abc import Mapping

import pytest

from runner.errors import ModelError
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import document, sentencepiece

Json = dict[str, object]

METASPACE: Json = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def load(data: Mapping[str, object]) -> Tokenizer:
    return open_tokenizer({"tokenizer.json": json.dumps(data).encode()}.get)


def with_model(**changes: object) -> Json:
    made = sentencepiece(["h", "i", "hi"])
    model = made["model"]
    assert isinstance(model, dict)
    changed = {**model, **changes}
    return {**made, "model": {key: value for key, value in changed.items() if value != "absent"}}


FORMS: dict[str, Json] = {
    "merges as strings": with_model(merges=["h i"]),
    "merges as lists": with_model(merges=[["h", "i"]]),
    "a model without a type": with_model(type="absent"),
    "a model whose type is null": with_model(type=None),
    "no word of bytes": with_model(byte_fallback="absent"),
    "dropout, a means of training": with_model(dropout=0.5),
}


@pytest.mark.parametrize("made", FORMS.values(), ids=FORMS)
def test_forms_of_the_model_that_files_come_in(made: Json) -> None:
    tokenizer = load(made)
    assert tokenizer.kind == "BPE"
    assert [tokenizer.encode("hi<s>") for _ in range(20)] == [[262, 2]] * 20
    assert tokenizer.token_bytes(4 + 0xE9) == b"\xe9"


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"vocab": {"hi": 0}, "unk_token": "hi"}, "WordLevel"),
        (
            {"vocab": {"hi": 0}, "unk_token": "hi", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
            "WordPiece",
        ),
        ({"vocab": [["hi", 0.0]], "unk_id": 0}, "Unigram"),
        ({"vocab": {"hi": 0}, "merges": []}, "BPE"),
    ],
)
def test_a_model_without_a_type_is_told_by_its_fields(model: Json, kind: str) -> None:
    tokenizer = load({"version": "1.0", "model": model})
    assert tokenizer.kind == kind
    assert tokenizer.vocab_size == 1
    if kind != "BPE":
        assert tokenizer.encode("hi") == [0]


# Ids of added tokens


def words(kind: str) -> Json:
    extra = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9} if kind == "WordPiece" else {}
    return {"type": kind, "vocab": {"<unk>": 0, "h": 1, "i": 2, "hi": 3}, "unk_token": "<unk>", **extra}


MODELS: dict[str, Json] = {
    "BPE": {"type": "BPE", "vocab": {"<unk>": 0, "h": 1, "i": 2, "hi": 3}, "merges": [["h", "i"]]},
    "Unigram": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", -9.0], ["▁", -2.0], ["h", -3.0], ["i", -3.0]]},
    "WordPiece": words("WordPiece"),
    "WordLevel": words("WordLevel"),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ids", [(5, 4), (4, 9)])
def test_the_ids_of_added_tokens_are_those_of_the_file(
    kind: str, ids: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [{"id": i, "content": text, **flags} for i, text in zip(ids, ("<a>", "<b>"), strict=True)]
    tokenizer = load(document(MODELS[kind], tokens))
    ordinary = load(document(MODELS[kind])).encode("hi")
    assert tokenizer.encode("<a>hi<b>") == [ids[0], *ordinary, ids[1]]
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["<a>", "<b>"]
    assert tokenizer.vocab_size == max(ids) + 1
    gaps = [gap for gap in range(4, 12) if gap not in ids]
    assert [tokenizer.token_bytes(gap) for gap in gaps] == [b""] * len(gaps)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["BPE", "WordLevel"])
def test_added_tokens_may_come_before_the_vocabulary(kind: str) -> None:
    """The library would give `<a>` the number of entries, which is another entry's id here."""
    model = {**MODELS[kind], "vocab": {"<unk>": 2, "h": 3, "i": 4, "hi": 5}}
    tokenizer = load(document(model, [{"id": 0, "content": "<a>"}, {"id": 1, "content": "<b>"}]))
    assert tokenizer.encode("<a>hi<b>") == [0, 5, 1]
    assert tokenizer.vocab_size == 6


def test_the_unknown_weighs_as_much_as_before_when_a_unigram_gets_more_ids() -> None:
    """Its score depends on the lowest one of the vocabulary."""
    model: Json = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["éx", -5.0], ["x", 12.0]]}
    for tokens in ([], [{"id": 9, "content": "<x>"}]):
        assert load(document(model, tokens)).encode("éx") == [0, 2]  # -5 - 10 + 12 is more than -5


# Without a decoder


def test_without_a_decoder_the_steps_before_the_model_say_how_bytes_are_written() -> None:
    byte_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model: Json = {"type": "Unigram", "vocab": [["Ġ▁a", 0.0]], "unk_id": 0}
    letters: Json = {"type": "BPE", "vocab": {"Ġ▁a": 0, "Ġé": 1}, "merges": []}
    for parts, wanted in (([byte_step], "Ġ▁a"), ([METASPACE], "Ġ a")):
        steps: Json = {"type": "Sequence", "pretokenizers": parts}
        assert load(document(model, pre_tokenizer=steps)).token_text(0) == wanted
        assert load(document(letters, pre_tokenizer=steps)).token_text(0) == wanted
    assert load(document({**model, "vocab": [["Ġé", 0.0]]}, pre_tokenizer=byte_step)).token_bytes(0) == b" \xe9"


def test_without_a_decoder_a_bpe_has_what_its_settings_say() -> None:
    vocab = {"<0x41>": 0, "▁a": 1, "b</w>": 2, "é": 3, "<unk>": 4}
    model: Json = {"type": "BPE", "vocab": vocab, "merges": []}
    suffixed = load(document({**model, "end_of_word_suffix": "</w>"}))
    assert [suffixed.token_bytes(i) for i in (1, 2)] == ["▁a".encode(), b"b "]
    fallen_back = load(document({**model, "byte_fallback": True, "unk_token": "<unk>"}))
    assert [fallen_back.token_bytes(i) for i in (0, 1)] == [b"A", b" a"]
    marked = load(document(model, pre_tokenizer=METASPACE))
    assert [marked.token_bytes(i) for i in (0, 1)] == [b"<0x41>", b" a"]
    nothing = load(document(model))
    assert nothing.token_bytes(3) == "é".encode()
    assert nothing.encode("é") == [3]


def test_without_a_decoder_word_pieces_have_the_prefix_of_the_model_and_words_a_space() -> None:
    vocab = {"[UNK]": 0, "ab": 1, "@@c": 2, "##d": 3, ".": 4}
    model: Json = {"vocab": vocab, "unk_token": "[UNK]"}
    word_piece: Json = {"type": "WordPiece", "continuing_subword_prefix": "@@", "max_input_chars_per_word": 9}
    tokenizer = load(document({**model, **word_piece}))
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3, 4)] == [b" ab", b"c", b" ##d", b" ."]
    tokenizer = load(document({**model, "type": "WordLevel"}))
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3)] == [b" ab", b" @@c", b" ##d"]


def test_bytes_are_bytes_where_the_model_or_the_decoder_says_so() -> None:
    vocab = {"<0x41>": 0, "a": 1}
    fuse: Json = {"type": "Fuse"}
    for byte_fallback, decoder, wanted in (
        (False, fuse, b"<0x41>"),
        (True, fuse, b"A"),
        (False, {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}]}, b"A"),
    ):
        model: Json = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": byte_fallback}
        assert load(document(model, decoder=decoder)).token_bytes(0) == wanted


# Errors


def added(token_id: int) -> Json:
    return {"id": token_id, "content": "<a>", "special": True}


def dumped(made: Json) -> bytes:
    return json.dumps(made).encode()


NAMED = r"tokenizer\.json: "
BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", NAMED),
    "half of it": (b"{", NAMED),
    "no vocabulary": (b'{"model": {"type": "BPE"}}', NAMED),
    "a text for an id": (dumped({**with_model(), "added_tokens": [{"id": "x"}]}), NAMED),
    "a merge without a piece": (dumped(document({"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]})), NAMED),
    "no unknown word": (dumped(document({"type": "WordPiece", "vocab": {"a": 0}})), NAMED),
    "an unknown beyond the end": (dumped(document({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5})), NAMED),
    "a list of words": (dumped(document({"type": "WordLevel", "vocab": ["a"], "unk_token": "a"})), NAMED),
    "a number of words": (dumped(document({"type": None, "vocab": 3})), NAMED),
    "another type": (dumped(document({"type": "Foo"})), r"unsupported tokenizer type: Foo$"),
    "no model": (dumped({"added_tokens": [added(1)]}), NAMED + ".*missing required field `model`"),
    "a panic in the library": (
        dumped({**with_model(), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
        NAMED + "Precompiled",
    ),
    "an id that would take gigabytes": (
        dumped(
            {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0]], "unk_id": 0}, "added_tokens": [added(2**32 - 1)]}
        ),
        ".*added token '<a>' has the id 4294967295, want one near 1",
    ),
    "nested": (b'{"model":{"type":"BPE"},"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", NAMED),
}


@pytest.mark.parametrize(("data", "text"), BROKEN.values(), ids=BROKEN)
def test_a_broken_or_hostile_file_is_named(data: bytes, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=f"^parse tokenizer: {text}"):
        open_tokenizer({"tokenizer.json": data}.get)
    capfd.readouterr()  # the library tells of its panics itself
