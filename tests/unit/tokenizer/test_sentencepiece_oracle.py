"""A `tokenizer.model` against the tokenizers that Hugging Face makes of it, on thousands of awkward texts.

Two oracles: transformers' own sentencepiece backend ("slow", which splits at added tokens and hands the rest to
sentencepiece), and the `tokenizer.json` that is equivalent to the model.
"""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, models, normalizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import trained_model

Ids = Callable[[str], list[int]]

SPECIAL = ("<unk>", "<s>", "</s>", "<|x|>", "<|xy|>")
PARTS = (
    *(" ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u3000", "\u00a0", "\u200b", "\u200d"),
    *("hello", " world", "the", "quick", "don't", "1234", "12", "a", "b", "x"),
    *("é", "e\u0301", "über", "日本語", "テスト", "\ufb01", "\uff48", "😀", "👨‍👩‍👧", "🇩🇪", "ﷺ"),
    *("\0", "\x01", "\x1b", "\x7f", "\ufffd", "\ufeff", "\ud800", "\udfff"),
    *("▁", "▁▁", "<0x41>", "<", ">", "<|", "|>", "<|x", "<S>"),
    *SPECIAL,
)


def some_texts(count: int, *more: str) -> list[str]:
    draw = random.Random(7)
    parts = PARTS + more
    mixed = ["".join(draw.choices(parts, k=draw.randint(2, 12))) for _ in range(count)]
    return ["", *parts, *(a + b for a, b in itertools.product(parts[:9] + SPECIAL, SPECIAL)), *mixed]


def without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def added_tokens(model: bytes) -> dict[str, dict[str, object]]:
    """The first three pieces and two tokens behind the pieces, as `added_tokens_decoder` has them."""
    size = SentencePieceProcessor(model_proto=model).get_piece_size()
    ids = [0, 1, 2, size, size + 1]
    return {str(i): {"content": t, "special": True, "normalized": False} for i, t in zip(ids, SPECIAL, strict=True)}


def ours(model: bytes, **config: object) -> Ids:
    settings = {"added_tokens_decoder": added_tokens(model), **config}
    return open_tokenizer({"tokenizer.model": model, "tokenizer_config.json": json.dumps(settings).encode()}.get).encode


def agree(encode: Ids, oracle: Ids, texts: list[str]) -> None:
    different = [text for text in texts if encode(text) != oracle(without_surrogates(text))]
    shown = sorted(different, key=len)[:3]
    assert not different, [(text, encode(text), oracle(without_surrogates(text))) for text in shown]


@pytest.mark.parametrize(
    ("algorithm", "normalization", "remove_extra_whitespaces", "dummy_prefix"),
    [
        ("bpe", "identity", False, True),
        ("unigram", "identity", True, False),
        ("bpe", "nmt_nfkc", True, False),
        ("unigram", "nmt_nfkc", False, True),
    ],
)
def test_it_reads_as_transformers_own_sentencepiece_backend(
    algorithm: Literal["bpe", "unigram"],
    normalization: Literal["identity", "nmt_nfkc"],
    remove_extra_whitespaces: bool,
    dummy_prefix: bool,
    tmp_path: Path,
) -> None:
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    symbols = ("<sym>", "[U]", "▁▁", "\n\n")
    model = trained_model(
        algorithm,
        dummy_prefix=dummy_prefix,
        normalization=normalization,
        remove_extra_whitespaces=remove_extra_whitespaces,
        user_defined=symbols,
    )
    (tmp_path / "tokenizer.model").write_bytes(model)
    slow = SentencePieceBackend(  # type: ignore[no-untyped-call]  # transformers has no types here
        vocab_file=str(tmp_path / "tokenizer.model"),
        legacy=True,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        added_tokens_decoder={
            int(i): AddedToken(str(token["content"]), normalized=False, special=True)
            for i, token in added_tokens(model).items()
        },
    )

    def oracle(text: str) -> list[int]:
        return list(slow.encode(text, add_special_tokens=False))

    agree(ours(model), oracle, some_texts(300, *symbols, "<sy"))


def equivalent(model: bytes, normalizer: Normalizer | None, pre_tokenizer: PreTokenizer | None) -> Ids:
    """Hugging Face's tokenizers with the pieces and merges of a BPE `model`: a piece merges by its score."""
    processor = SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -processor.get_score(vocab[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab and vocab[piece] >= 259
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def spaces() -> Normalizer:
    return normalizers.Replace(" ", "▁")


def test_it_reads_as_the_equivalent_tokenizer_json_of_llama() -> None:
    """`Prepend`: every part of a text begins with one more space."""
    model = trained_model()
    oracle = equivalent(model, normalizers.Sequence([normalizers.Prepend("▁"), spaces()]), None)
    agree(ours(model), oracle, some_texts(1000))
    agree(ours(model, legacy=True), oracle, some_texts(200))


def test_it_reads_as_the_equivalent_tokenizer_json_of_gemma() -> None:
    model = trained_model(dummy_prefix=False)
    agree(ours(model), equivalent(model, spaces(), None), some_texts(1000))
    prefixed = trained_model()
    agree(ours(prefixed, add_prefix_space=False), equivalent(prefixed, spaces(), None), some_texts(1000))
