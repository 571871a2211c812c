"""A `tokenizer.json` of every model type and decoder, against Hugging Face's tokenizers themselves."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer, models, trainers
from tokenizers import decoders as dec
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from tokenizers.decoders import Decoder
from tokenizers.models import Model
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.trainers import Trainer

from runner.tokenizer import Tokenizer as OurTokenizer
from runner.tokenizer import open_tokenizer
from runner.tokenizer.tokenizer import decode_utf8
from scripts.tools.models.tokenizers import CORPUS, document

Json = dict[str, object]

UNKNOWN = "[UNK]"
SPECIAL = [UNKNOWN, "[CLS]"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz.,!?'0123456789")
PARTS = (
    *("hello", "world", "the quick", "don't", "do not", "1234", "x7", ".", ", ", "!", " n't", " 's"),
    *(
        " ",
        "  ",
        "\n",
        "\t",
        "\u3000",
        "über",
        "日本語",
        "テスト",
        "e\u0301",
        "\ufb01",
        "😀",
        "▁",
        "##a",
        "</w>",
        "[UN",
    ),
)
METASPACE: Json = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


class Kind(NamedTuple):
    """A way of tokenizing, trained on `CORPUS`."""

    name: str
    model: Model
    trainer: Trainer
    normalizer: Normalizer | None = None
    pre_tokenizer: PreTokenizer | None = None
    decoder: Decoder | None = None


def bpe(*, byte_alphabet: bool = False, suffix: str = "") -> trainers.BpeTrainer:
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=[] if byte_alphabet else SPECIAL,
        initial_alphabet=pre.ByteLevel.alphabet() if byte_alphabet else LETTERS,
        show_progress=False,
    )
    if suffix:
        trainer.end_of_word_suffix = suffix
    return trainer


KINDS: dict[str, Callable[[], Kind]] = {
    "GPT-2": lambda: Kind(
        "BPE",
        models.BPE(),
        bpe(byte_alphabet=True),
        pre_tokenizer=pre.ByteLevel(add_prefix_space=False),
        decoder=dec.ByteLevel(),
    ),
    "several splits": lambda: Kind(
        "BPE",
        models.BPE(ignore_merges=True),
        bpe(byte_alphabet=True),
        norm.NFC(),
        pre.Sequence(
            [
                pre.Digits(individual_digits=True),
                pre.Split("o", "merged_with_next"),
                pre.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        dec.Sequence([dec.ByteLevel()]),
    ),
    "word ends": lambda: Kind(
        "BPE",
        models.BPE(unk_token=UNKNOWN, end_of_word_suffix="</w>"),
        bpe(suffix="</w>"),
        norm.BertNormalizer(),
        pre.BertPreTokenizer(),
        dec.BPEDecoder("</w>"),
    ),
    "BPE with marks for spaces": lambda: Kind(
        "BPE", models.BPE(unk_token=UNKNOWN, fuse_unk=True), bpe(), None, pre.Metaspace(), dec.Metaspace()
    ),
    "Unigram": lambda: Kind(
        "Unigram",
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIAL, unk_token=UNKNOWN, initial_alphabet=LETTERS, show_progress=False
        ),
        norm.Sequence([norm.NFKC(), norm.Lowercase()]),
        pre.Sequence([pre.WhitespaceSplit(), pre.Metaspace()]),
        dec.Metaspace(),
    ),
    "WordPiece": lambda: Kind(
        "WordPiece",
        models.WordPiece(unk_token=UNKNOWN),
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=SPECIAL, initial_alphabet=LETTERS, show_progress=False
        ),
        norm.BertNormalizer(),
        pre.BertPreTokenizer(),
        dec.WordPiece(),
    ),
    "WordLevel": lambda: Kind(
        "WordLevel",
        models.WordLevel(unk_token=UNKNOWN),
        trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False),
        pre_tokenizer=pre.Whitespace(),
    ),
    "BPE with a sequence of steps": lambda: KINDS["BPE with marks for spaces"]()._replace(
        decoder=dec.Sequence([dec.Replace("▁", " "), dec.Fuse(), dec.Strip(" ", 1, 0)])
    ),
}


def trained(kind: Kind) -> Tokenizer:
    tokenizer = Tokenizer(kind.model)
    tokenizer.normalizer = kind.normalizer
    tokenizer.pre_tokenizer = kind.pre_tokenizer
    tokenizer.decoder = kind.decoder
    tokenizer.train_from_iterator(CORPUS, kind.trainer)
    return tokenizer


def load(data: Mapping[str, object] | str) -> OurTokenizer:
    text = data if isinstance(data, str) else json.dumps(data)
    return open_tokenizer({"tokenizer.json": text.encode()}.get)


def text_of(tokenizer: OurTokenizer, ids: Sequence[int]) -> str:
    return decode_utf8(b"".join(map(tokenizer.token_bytes, ids)))


def some_texts(count: int) -> list[str]:
    draw = random.Random(11)
    return ["", *PARTS, *("".join(draw.choices(PARTS, k=draw.randint(2, 10))) for _ in range(count))]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_ids_and_text_are_those_of_the_library(make: Callable[[], Kind]) -> None:
    """Equal except at the ends of a text, where the first space and the one after the last word are kept."""
    kind = make()
    theirs = trained(kind)
    tokenizer = load(theirs.to_str())
    assert tokenizer.kind == kind.name
    assert tokenizer.vocab_size == theirs.get_vocab_size()
    unknown = theirs.token_to_id(UNKNOWN)
    read = 0
    for text in some_texts(300):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        if unknown not in ids:  # a special token stands for its own text, here without a space before it
            assert text_of(tokenizer, ids).strip(" ") == theirs.decode(ids, skip_special_tokens=False).strip(" ")
            read += 1
    assert read > 9


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
    assert text_of(nothing, nothing.encode("é")) == "é"


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
