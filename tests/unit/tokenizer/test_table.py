"""The forms that a tokenizer comes in, each compared with transformers: ids, text, pieces, formats, stop strings.

Where transformers is wrong, the row says why, and what the file should have said: that is what the answers are held to.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial

import pytest
from sentencepiece import SentencePieceProcessor

from protocol.format import decode_format
from runner.grammar.compiler import Compiler
from runner.tokenizer import Tokenizer, open_tokenizer
from runner.tokenizer.detokenizer import Detokenizer, StopStrings, Utf8Stream, decode_utf8
from scripts.tools.models.tokenizers import GPT2_SPLIT, trained_model
from tests.unit.tokenizer.forms import (
    BERT,
    BYTES,
    FALLBACK,
    FORMS,
    FUSE,
    LLAMA,
    PLAIN,
    STRIP,
    TEXTS,
    Form,
    Json,
    bert,
    decoders,
    metaspace,
    of_bytes,
    of_marks,
    replace,
    spell,
    split,
    steps,
)

PARTS = (*TEXTS, "a", "b", " ", "  ", "\n", "é", "日", "😀", "\u0301", "\u200d", "▁", "'s", "1")


def load(made: Mapping[str, object]) -> Tokenizer:
    return open_tokenizer({"tokenizer.json": json.dumps(made).encode()}.get, merge_eos=True)


class Oracle:
    """A tokenizer of transformers, made from the file."""

    def __init__(self, made: Mapping[str, object]) -> None:
        from tokenizers import Tokenizer as Library
        from transformers import PreTrainedTokenizerFast

        library = Library.from_str(json.dumps(made))
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=library)

    def encode(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return decode_utf8(b"".join(map(tokenizer.token_bytes, ids)))


def more_texts(count: int) -> list[str]:
    draw = random.Random(17)
    return ["".join(draw.choices(PARTS, k=draw.randint(2, 8))) for _ in range(count)]


def unknown(made: Json) -> object:
    """Returns the id of the unknown token, which is no text."""
    model = made["model"]
    assert isinstance(model, dict)
    if model["type"] == "Unigram":
        return model["unk_id"]
    return model["vocab"].get(model.get("unk_token"))


def check_ids_and_text(form: Form, texts: Sequence[str]) -> None:
    """Ids and text are those of transformers, except for spaces at the ends of the text. Special tokens keep theirs."""
    tokenizer, oracle = load(form.made), Oracle({**form.made, **(form.right or {})})
    lost = unknown(form.made)
    joined = form.made["model"]["type"] not in ("WordPiece", "WordLevel")  # type: ignore[index]  # literals above
    mark = form.made["model"].get("end_of_word_suffix") or "no mark"  # type: ignore[attr-defined]
    read = 0
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        if lost not in ids and mark not in text and (joined or tokenizer.special.isdisjoint(ids)):
            assert text_of(tokenizer, ids).strip(" ") == oracle.decode(ids).strip(" "), text
            read += 1
        if form.spells and "▁" not in text:
            assert text_of(tokenizer, ids).removeprefix(" ") == text.removeprefix(" ")
    assert read > 2


def check_wrong(form: Form, texts: Sequence[str]) -> None:
    """transformers errs where the row says so."""
    right, wrong = Oracle({**form.made, **(form.right or {})}), Oracle(form.made)
    assert any(wrong.decode(wrong.encode(text)) != right.decode(right.encode(text)) for text in texts)


def check_streams(tokenizer: Tokenizer, text: str) -> None:
    """The pieces of text that a stream delivers are the text, wherever the tokens are cut."""
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    whole, delivered = decode_utf8(b"".join(pieces)), ""
    stream = Utf8Stream()
    for at, piece in enumerate(pieces):
        rest = copy(stream)
        assert delivered + rest.feed(b"".join(pieces[at:])) + rest.finish() == whole
        delivered += stream.feed(piece)
        assert whole.startswith(delivered)
    assert delivered + stream.finish() == whole


TOLD = "the world the world"


def check_stops(tokenizer: Tokenizer) -> None:
    """A stop string with a space ends the text where it begins."""
    detokenizer: Detokenizer[int] = Detokenizer(tokenizer.token_bytes, StopStrings(["world the"]))
    pieces = [detokenizer.push(token) for token in tokenizer.encode(TOLD)]
    assert detokenizer.stopped
    said = "".join(piece.text for piece in pieces if piece is not None)
    assert said.endswith("the ")
    assert "world" not in said


FORCED = '{"k": "the wörld"}'


def check_format(tokenizer: Tokenizer) -> None:
    """A format that leaves no choice is spelled by tokens whose bytes are its text."""
    schema = {"properties": {"k": {"const": json.loads(FORCED)["k"]}}, "required": ["k"], "type": "object"}
    wanted = decode_format(json.dumps(schema).encode())
    assert wanted is not None
    compiler = Compiler(tokenizer, tokenizer.vocab_size)
    _, state = compiler.compile(wanted)
    assert not state.error
    assert text_of(tokenizer, state.forced) == FORCED
    for token in tokenizer.encode(TEXTS[2]):
        assert compiler.vocabulary.decode_bytes([token]) == tokenizer.token_bytes(token)


@pytest.mark.parametrize("name", FORMS)
def test_a_form(name: str) -> None:
    form = FORMS[name]
    check_ids_and_text(form, TEXTS)
    if form.why:
        check_wrong(form, TEXTS)
    tokenizer = load(form.made)
    for text in TEXTS:
        check_streams(tokenizer, text)
    if not form.loses_spaces:
        check_stops(tokenizer)
    if form.spells:
        check_format(tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("name", FORMS)
def test_a_form_with_more_texts(name: str) -> None:
    check_ids_and_text(FORMS[name], more_texts(300))


STEPS: list[Json] = [
    {"type": "Digits", "individual_digits": True},
    {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "FixedLength", "length": 2},
    split("o| ", "MergedWithNext"),
    split("[aeiou]", "Contiguous"),
    split(GPT2_SPLIT, "Isolated"),
]
REMOVING: list[Json] = [
    {"type": "UnicodeScripts"},
    {"type": "WhitespaceSplit"},
    {"type": "Whitespace"},
    BERT,
    split(" ", "Removed"),
]
FORMS_OF_TEXT: list[Json] = [{"type": "NFC"}, {"type": "NFKD"}, {"type": "Lowercase"}, bert(), replace("o", "0")]
DECODERS: list[Json | None] = [
    *(None, BYTES, LLAMA, FUSE, FALLBACK, STRIP, metaspace(), metaspace("never"), replace("▁", " "), decoders(BYTES)),
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "BPEDecoder", "suffix": "</w>"},
    {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_any_steps_with_any_decoder(seed: int) -> None:
    """The decoder never matters: the steps say what is right."""
    draw = random.Random(seed)
    texts = [*TEXTS, *more_texts(10)]
    for _ in range(20):
        spelled = [*draw.sample(STEPS + REMOVING, draw.randint(0, 2)), spell(prefix=draw.random() < 0.3)]
        marked = [*draw.sample(STEPS, draw.randint(0, 2)), metaspace(draw.choice(["always", "first", "never"]))]
        other: Json = {"normalizer": draw.choice([None, *FORMS_OF_TEXT]), "decoder": draw.choice(DECODERS)}
        for made, right in (
            (of_bytes(pre_tokenizer=steps(*spelled), **other), BYTES),
            (of_marks(pre_tokenizer=steps(*marked), **other), decoders(replace("▁", " "), FALLBACK, FUSE)),
        ):
            check_ids_and_text(Form(made, right={"decoder": right}), texts)


# --- A `tokenizer.model` alone, compared with sentencepiece.

MODELS: dict[str, Callable[[], bytes]] = {
    "BPE": trained_model,
    "BPE without a space in front": partial(trained_model, dummy_prefix=False),
    "BPE, user-defined": partial(trained_model, user_defined=("<x>", "▁▁", "\n")),
    "unigrams": partial(trained_model, "unigram"),
    "unigrams, charsmap": partial(trained_model, "unigram", normalization="nmt_nfkc"),
    "unigrams without bytes": partial(trained_model, "unigram", byte_fallback=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_tokenizer_model(name: str) -> None:
    model = MODELS[name]()
    theirs = SentencePieceProcessor(model_proto=model)
    tokenizer = open_tokenizer({"tokenizer.model": model}.get, merge_eos=True)
    for text in (*PLAIN, "<x>the<x>"):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        if theirs.unk_id() not in ids:
            assert text_of(tokenizer, ids).strip(" ") == theirs.decode(ids).strip(" ")
        check_streams(tokenizer, text)
    check_stops(tokenizer)
    if "without bytes" not in name:
        check_format(tokenizer)
