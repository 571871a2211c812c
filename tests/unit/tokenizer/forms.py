"""The forms that a `tokenizer.json` comes in, by name: the file, and where transformers errs, what is right."""

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from sentencepiece import sentencepiece_model_pb2

from scripts.tools.models.tokenizers import ALL_BYTES, GPT2_SPLIT, byte_level, document, sentencepiece, trained_model

Json = dict[str, object]

SPECIAL = ["<s>", "<|x|>"]
UNKNOWN = "[UNK]"
WORDS = [b"he", b"ll", b"hell", b"hello", b" the", b" w", b"or", b" wor", b"ld", b" world", b"\xe3\x81", b"\xc3\xa9"]
PIECES = [*(" ", "h", "e", "l", "o", "w", "r", "d", "t", "x", "y", "é", "日"), "he", "ll", "hell", " w", "  ", "the"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'{}\":<>|/#_éüł日本語мир"

PLAIN = (
    *("", " ", "Hello the world\n on", "  two  spaces ", "hell\tand\r\nnew\n\n", "don't 1234 x7. , n't", "the"),
    *("über naïve e\u0301 \ufb01 Å", "日本語 テスト", "नमस्ते दुनिया", "مرحبا بالعالم", "Привет мир", "한국어 테스트"),
    *("😀 👨‍👩‍👧 🇩🇪", "a\u0300\u0301\u0323", "\x01\x7f\u200b\u2028\ufeff", "\u3000\u00a0x", "Ġ </w> ## <0x41> ĉ"),
)
TEXTS = (*PLAIN, "<s>the<|x|> world", "<|tool▁call|>", " <|x|> ", "<|x", "<s><s>hell")


class Form(NamedTuple):
    """A `tokenizer.json`; `right` are the parts that it should have, and `why` the reason.

    `spells` is true if every text can be encoded and decoded without a loss, but for a space in front.
    """

    made: Json
    spells: bool = False
    right: Json | None = None
    why: str = ""
    loses_spaces: bool = False


def steps(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def normalizers(*parts: Json) -> Json:
    return {"type": "Sequence", "normalizers": list(parts)}


def decoders(*parts: Json) -> Json:
    return {"type": "Sequence", "decoders": list(parts)}


def spell(*, prefix: bool = False, regex: bool = True) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def split(pattern: str, behavior: str, *, invert: bool = False) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def metaspace(scheme: str = "always", *, split: bool = True, mark: str = "▁") -> Json:
    return {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": split}


def replace(old: str, new: str) -> Json:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def bert(**changes: object) -> Json:
    usual = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    return {"type": "BertNormalizer", **usual, **changes}


def with_model(made: Json, **changes: object) -> Json:
    model = made["model"]
    assert isinstance(model, dict)
    return {**made, "model": {**model, **changes}}


@cache
def charsmap() -> Json:
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made while it is imported
    proto.ParseFromString(trained_model("unigram", normalization="nmt_nfkc"))
    data = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    return {"type": "Precompiled", "precompiled_charsmap": data}


BERT: Json = {"type": "BertPreTokenizer"}
FUSE: Json = {"type": "Fuse"}
FALLBACK: Json = {"type": "ByteFallback"}
STRIP: Json = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LLAMA = decoders(replace("▁", " "), FALLBACK, FUSE, STRIP)
"""The decoder of transformers' class for Llama."""
BYTES: Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
RIGHT: Json = {"decoder": BYTES}
WRITTEN = "a class for another model has written its decoder into the file"
LOST = "a class for another model has written its steps into the file: spaces would be lost in encoding"


def of_bytes(**parts: object) -> Json:
    return {**byte_level([*ALL_BYTES, *WORDS], SPECIAL), **parts}


def byte_level_forms() -> Iterator[tuple[str, Form]]:
    ends = {"sep": ["<s>", 268], "cls": ["<s>", 268]}
    plain: dict[str, Json] = {
        "split, then bytes": {},
        "bytes": {"pre_tokenizer": spell()},
        "without words": {"pre_tokenizer": spell(regex=False)},
        "nested": {"pre_tokenizer": steps(steps(spell()))},
        "digits": {"pre_tokenizer": steps({"type": "Digits", "individual_digits": True}, spell())},
        "numbers": {"pre_tokenizer": steps({"type": "Digits", "individual_digits": False}, spell(regex=False))},
        "three characters": {"pre_tokenizer": steps({"type": "FixedLength", "length": 3}, spell(regex=False))},
        "bytes by a normalizer": {"pre_tokenizer": None, "normalizer": {"type": "ByteLevel"}},
        "a decoder in a sequence": {"decoder": decoders(BYTES)},
        "template": {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [268], "tokens": ["<s>"]}},
            }
        },
        "Roberta": {
            "post_processor": {"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": False}
        },
        "BERT's ends": {"post_processor": {"type": "BertProcessing", **ends}},
        "trimmed offsets": {"post_processor": spell()},
    }
    for behavior in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        plain[f"split {behavior}"] = {"pre_tokenizer": steps(split("o| ", behavior), spell(regex=False))}
    for behavior in ("Isolated", "Contiguous"):
        plain[f"punctuation {behavior}"] = {
            "pre_tokenizer": steps({"type": "Punctuation", "behavior": behavior}, spell(regex=False))
        }
    for name, parts in plain.items():
        yield name, Form(of_bytes(**parts), spells=True)
    models: dict[str, Json] = {
        "whole words first": {"ignore_merges": True},
        "unknown": {"unk_token": "<s>", "fuse_unk": True},
        "byte fallback": {"byte_fallback": True},
        "prefix of parts": {"continuing_subword_prefix": ""},
    }
    for name, changes in models.items():
        yield name, Form(with_model(of_bytes(), **changes), spells=True)
    changing: dict[str, Json] = {
        **{kind: {"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt")},
        "accents": normalizers({"type": "NFD"}, {"type": "StripAccents"}),
        "stripped": {"type": "Strip", "strip_left": True, "strip_right": True},
        "replaced": replace("hell", "heaven"),
        "prepended": {"type": "Prepend", "prepend": "_"},
        "BERT": bert(),
        "BERT, cased": bert(lowercase=False, strip_accents=True),
        "charsmap": charsmap(),
    }
    for name, step in changing.items():
        yield f"{name} normalizer", Form(of_bytes(normalizer=step))
    removing = {
        "removed": steps(split(r"\s+", "Removed"), spell(prefix=True)),
        "inverted": steps(split(r"\w+|[^\w\s]+", "Removed", invert=True), spell(prefix=True)),
        "by white space": steps({"type": "WhitespaceSplit"}, spell(prefix=True)),
        "by scripts": steps({"type": "UnicodeScripts"}, spell()),
    }
    for name, step in removing.items():
        yield f"split {name}", Form(of_bytes(pre_tokenizer=step))
    yield "with a space in front", Form(of_bytes(pre_tokenizer=spell(prefix=True)))
    lies: dict[str, object] = {
        "Llama": LLAMA,
        "Gemma": decoders(replace("▁", " "), FALLBACK, FUSE),
        "Metaspace": metaspace(),
        "Fuse": FUSE,
        "ByteFallback": FALLBACK,
        "Replace": replace("▁", " "),
        "Strip": STRIP,
        "WordPiece": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "BPE": {"type": "BPEDecoder", "suffix": "</w>"},
        "CTC": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        "no": None,
    }
    for name, decoder in lies.items():
        yield f"bytes, {name} decoder", Form(of_bytes(decoder=decoder), True, RIGHT, WRITTEN)
    added = of_bytes()["added_tokens"]
    assert isinstance(added, list)
    tool = {**added[-1], "id": added[-1]["id"] + 1, "content": "<|tool▁call|>", "special": False}
    yield (
        "bytes, an added token with a mark",
        Form(of_bytes(added_tokens=[*added, tool], decoder=LLAMA), True, RIGHT, WRITTEN),
    )
    yield (
        "bytes by a normalizer, Llama decoder",
        Form(of_bytes(pre_tokenizer=None, normalizer={"type": "ByteLevel"}, decoder=LLAMA), True, RIGHT, WRITTEN),
    )
    mended: dict[str, Json] = {
        "Llama's steps": {"pre_tokenizer": metaspace("first", split=False), "decoder": LLAMA},
        "Llama 2's steps": {
            "normalizer": normalizers({"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
            "pre_tokenizer": None,
            "decoder": LLAMA,
        },
        "no steps": {"pre_tokenizer": None},
    }
    for name, parts in mended.items():
        nfc = {"type": "NFC"} if "normalizer" in parts else None
        yield (
            f"bytes, {name}",
            Form(of_bytes(**parts), nfc is None, {"normalizer": nfc, "pre_tokenizer": spell(), **RIGHT}, LOST),
        )
    kept = steps(split(GPT2_SPLIT, "Isolated"), metaspace("never"))
    yield (
        "bytes, Llama's steps behind a split",
        Form(
            of_bytes(pre_tokenizer=kept, decoder=LLAMA),
            True,
            {"pre_tokenizer": steps(split(GPT2_SPLIT, "Isolated"), spell(regex=False)), **RIGHT},
            LOST,
        ),
    )
    yield from byte_level_models()


def byte_level_models() -> Iterator[tuple[str, Form]]:
    """Byte-level vocabularies with the marks of another kind of model."""
    letters = list(json.loads(json.dumps(byte_level()["model"]))["vocab"])
    pieces = [UNKNOWN, *letters, *("Ġthe", "hell")]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    ends = {f"{letter}</w>": len(ids) + number for number, letter in enumerate(letters)}
    clip = with_model(of_bytes(), vocab={**ids, **ends}, merges=[], end_of_word_suffix="</w>")
    yield (
        "CLIP",
        Form(
            {**clip, "added_tokens": [], "pre_tokenizer": steps({"type": "WhitespaceSplit"}, spell(regex=False))},
            right={"decoder": decoders(BYTES, replace("</w>", " "))},
            why="the class for CLIP takes the ends of words out itself",
        ),
    )
    parts = {f"##{letter}": len(ids) + number for number, letter in enumerate(letters)}
    words: Json = {
        "type": "WordPiece",
        "vocab": {**ids, **parts},
        "unk_token": UNKNOWN,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 200,
    }
    yield (
        "word pieces of bytes",
        Form(
            document(words, pre_tokenizer=spell(), decoder={"type": "WordPiece", "prefix": "##", "cleanup": False}),
            True,
            {"decoder": decoders(replace("##", ""), BYTES)},
            "spaces are in the pieces already",
        ),
    )
    scored = [[piece, -1.0 - number] for number, piece in enumerate(ids)]
    yield (
        "unigrams of bytes",
        Form(document({"type": "Unigram", "vocab": scored, "unk_id": 0}, pre_tokenizer=spell(), decoder=BYTES), True),
    )
    yield (
        "single bytes as words",
        Form(
            document(
                {"type": "WordLevel", "vocab": ids, "unk_token": UNKNOWN},
                pre_tokenizer=steps(spell(regex=False), {"type": "FixedLength", "length": 1}),
                decoder=BYTES,
            ),
            True,
        ),
    )


def of_marks(*pieces: str, **parts: object) -> Json:
    return {**sentencepiece([*PIECES, *pieces], ["<|x|>"]), **parts}


def marked_forms() -> Iterator[tuple[str, Form]]:
    for scheme in ("always", "first", "never"):
        for whole in (False, True):
            step = metaspace(scheme, split=not whole)
            yield (
                f"Metaspace {scheme}{', whole' if whole else ''}",
                Form(
                    of_marks(normalizer=None, pre_tokenizer=step, decoder=decoders(FALLBACK, step)), scheme == "never"
                ),
            )
    normal = replace(" ", "▁")
    prepend: Json = {"type": "Prepend", "prepend": "▁"}
    gemma = decoders(replace("▁", " "), FALLBACK, FUSE)
    yield "Gemma", Form(of_marks(), True)
    yield "Llama 2", Form(of_marks(normalizer=normalizers(prepend, normal), decoder=LLAMA))
    yield (
        "Llama, a class's steps",
        Form(of_marks(normalizer=None, pre_tokenizer=metaspace("first", split=False), decoder=LLAMA)),
    )
    split_first = steps({"type": "WhitespaceSplit"}, metaspace())
    t5 = of_marks(normalizer=None, pre_tokenizer=split_first, decoder=decoders(FALLBACK, metaspace()))
    yield "T5's splits", Form(t5)
    step = metaspace(mark="_")
    other = of_marks("_", normalizer=None, pre_tokenizer=step, decoder=decoders(FALLBACK, step))
    yield "another mark", Form(with_model(other, merges=[]))
    yield "unknowns apart", Form(with_model(of_marks(), fuse_unk=False, byte_fallback=False))
    yield "unknowns together", Form(with_model(of_marks(), byte_fallback=False))
    fallback = "the model has bytes, whatever the decoder says"
    yield (
        "no bytes in the decoder",
        Form(of_marks(decoder=decoders(replace("▁", " "), FUSE)), True, {"decoder": gemma}, fallback),
    )
    for name, decoder in (("Fuse", FUSE), ("no", None), ("byte-level", BYTES)):
        yield f"marks, {name} decoder", Form(of_marks(decoder=decoder), True, {"decoder": gemma}, WRITTEN)
    yield (
        "another mark, Llama decoder",
        Form(
            with_model(of_marks("·", normalizer=None, pre_tokenizer=metaspace(mark="·"), decoder=LLAMA), merges=[]),
            right={"decoder": decoders(replace("·", " "), FALLBACK, FUSE, STRIP)},
            why=WRITTEN,
        ),
    )
    hybrid = list(json.loads(json.dumps(byte_level()["model"]))["vocab"])
    more = [letter for letter in hybrid if letter not in PIECES]
    yield "all letters of Latin scripts", Form(sentencepiece([*PIECES, *more], ["<|x|>"]), True)


def unigram_forms() -> Iterator[tuple[str, Form]]:
    texts = [UNKNOWN, "▁", *LETTERS, "▁the", "hell", "▁w"]
    scored = [[text, -1.0 - 0.01 * number] for number, text in enumerate(dict.fromkeys(texts))]
    model: Json = {"type": "Unigram", "vocab": scored, "unk_id": 0}
    bytes_too = [*scored, *([f"<0x{value:02X}>", -50.0] for value in range(256))]
    step = metaspace()
    yield "unigrams", Form(document(model, pre_tokenizer=step, decoder=step))
    yield "unigrams, charsmap", Form(document(model, normalizer=charsmap(), pre_tokenizer=step, decoder=step))
    nfkc = normalizers({"type": "NFKC"}, replace("  ", " "))
    yield "unigrams, NFKC", Form(document(model, normalizer=nfkc, pre_tokenizer=step, decoder=step))
    fallen_back, never = {**model, "vocab": bytes_too, "byte_fallback": True}, metaspace("never")
    made = document(fallen_back, pre_tokenizer=never, decoder=decoders(FALLBACK, never))
    yield "unigrams, bytes", Form(made, True)
    yield (
        "unigrams, no decoder",
        Form(document(model, pre_tokenizer=step), right={"decoder": step}, why="nothing joins pieces"),
    )


def word_forms() -> Iterator[tuple[str, Form]]:
    letters = dict.fromkeys(LETTERS)
    pieces = [UNKNOWN, *letters, *(f"##{letter}" for letter in letters), "the", "hell", "##ll"]
    model: Json = {
        "type": "WordPiece",
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "unk_token": UNKNOWN,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    join: Json = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    yield "word pieces", Form(document(model, normalizer=bert(), pre_tokenizer=BERT, decoder=join))
    cased = bert(lowercase=False)
    yield "word pieces, cased", Form(document(model, normalizer=cased, pre_tokenizer=BERT, decoder=join))
    cleaned = {**join, "cleanup": True}
    yield "word pieces, cleaned up", Form(document(model, normalizer=bert(), pre_tokenizer=BERT, decoder=cleaned))
    bare = document(model, pre_tokenizer=BERT)
    right: Json = {"decoder": join}
    yield "word pieces, no decoder", Form(bare, right=right, why="nothing joins parts")
    yield "word pieces, a decoder that joins all", Form({**bare, "decoder": FUSE}, right=right, why=WRITTEN)
    all_words = dict.fromkeys(word for text in TEXTS for word in re.findall(r"\w+|[^\w\s]|[^\w\s]+|\S+", text))
    words: Json = {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate([UNKNOWN, *all_words])},
        "unk_token": UNKNOWN,
    }
    for name, step in {
        "words": {"type": "Whitespace"},
        "words between spaces": {"type": "WhitespaceSplit"},
        "words between characters": {"type": "CharDelimiterSplit", "delimiter": " "},
        "words, split": split(r"\s", "Removed"),
        "words, punctuation": steps({"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "Isolated"}),
    }.items():
        yield name, Form(document(words, pre_tokenizer=step))
    suffixed = [UNKNOWN, *letters, *(f"{letter}</w>" for letter in letters)]
    bpe = with_model(
        of_bytes(),
        vocab={piece: number for number, piece in enumerate(suffixed)},
        merges=[],
        unk_token=UNKNOWN,
        end_of_word_suffix="</w>",
    )
    joined: Json = {"type": "BPEDecoder", "suffix": "</w>"}
    letter = with_model(bpe, end_of_word_suffix=None)
    lost = {"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "decoder": FUSE}
    yield "letters without spaces", Form({**letter, **lost}, loses_spaces=True)
    marked = {**bpe, "added_tokens": [], "normalizer": bert(), "pre_tokenizer": BERT, "decoder": joined}
    yield "ends of words", Form(marked)
    yield (
        "ends of words, byte-level decoder",
        Form({**marked, "decoder": BYTES}, right={"decoder": joined}, why=WRITTEN),
    )


FORMS = dict[str, Form]([*byte_level_forms(), *marked_forms(), *unigram_forms(), *word_forms()])
