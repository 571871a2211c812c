"""A `tokenizer.model` against transformers' own sentencepiece backend, on hundreds of awkward texts.

The backend ("slow") splits at added tokens and hands the rest to sentencepiece.
"""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

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
    slow = SentencePieceBackend(
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
