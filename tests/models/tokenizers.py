"""Makers of tiny `tokenizer.json` files, in the two forms that BPE models come in.

Token ids are positions in the vocabulary that the caller gives, so a test knows every id. Special tokens follow it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

GPT2_SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How byte-level models cut text into words before merging (GPT-2's rule)."""

ALL_BYTES: tuple[bytes, ...] = tuple(bytes([value]) for value in range(256))
"""The vocabulary that can spell everything; a sensible beginning of any other."""


def _byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, spare = [], 0x100
    for value in range(256):
        if value in printable:
            letters.append(chr(value))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


_LETTERS = _byte_letters()


def spell(token: bytes) -> str:
    """A byte string in the alphabet of byte-level vocabularies: a space is `Ġ`."""
    return "".join(_LETTERS[value] for value in token)


def _merges(tokens: Iterable[str]) -> list[list[str]]:
    """One merge per token of two letters or more that two tokens before it make up; shorter results come first."""
    known = set(tokens)
    merges = []
    for token in sorted(known, key=lambda text: (len(text), text)):
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in known and token[cut:] in known:
                merges.append([token[:cut], token[cut:]])
                break
    return merges


def _added(tokens: Sequence[str], first_id: int) -> list[dict[str, object]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": first_id + index, "content": token, **plain} for index, token in enumerate(tokens)]


def byte_level(
    vocabulary: Sequence[bytes] = ALL_BYTES, special_tokens: Sequence[str] = (), *, split: str = GPT2_SPLIT
) -> dict[str, object]:
    """A byte-level BPE: id i means exactly the bytes `vocabulary[i]`, whatever they are; special tokens come after.

    Text encodes to the longest merges that the vocabulary allows. Bytes that no token spells are lost in encoding.
    """
    vocab = {spell(token): index for index, token in enumerate(vocabulary)}
    if len(vocab) != len(vocabulary):
        raise ValueError("the vocabulary holds a byte string twice")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(special_tokens, len(vocab)),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(vocab),
        },
    }


SENTENCEPIECE_SPECIAL = ("<pad>", "</s>", "<s>", "<unk>")
"""The first ids of `sentencepiece` vocabularies; the 256 byte tokens `<0x00>`.. follow."""


def sentencepiece(
    pieces: Sequence[str], special_tokens: Sequence[str] = (), *, prepend_space: bool = False
) -> dict[str, object]:
    """A sentencepiece-style BPE with byte fallback, as Gemma's (`prepend_space`: as Llama 2's) `tokenizer.json`.

    `pieces` are written with plain spaces. Ids: four specials, 256 byte tokens, the pieces, `special_tokens`.
    """
    texts = [piece.replace(" ", "▁") for piece in pieces]
    vocab = {
        token: index
        for index, token in enumerate([*SENTENCEPIECE_SPECIAL, *(f"<0x{value:02X}>" for value in range(256)), *texts])
    }
    if len(vocab) != len(SENTENCEPIECE_SPECIAL) + 256 + len(texts):
        raise ValueError("the pieces hold a text twice")
    replace: dict[str, object] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend: dict[str, object] = {"type": "Prepend", "prepend": "▁"}
    strip: list[dict[str, object]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend_space else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [*_added(SENTENCEPIECE_SPECIAL, 0), *_added(special_tokens, len(vocab))],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if prepend_space else replace,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(texts),
        },
    }


def vocabulary_size(tokenizer: dict[str, object]) -> int:
    """How many ids the tokenizer has, special tokens included."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    assert isinstance(model, dict)
    assert isinstance(added, list)
    base = len(model["vocab"])
    return base + len([token for token in added if token["id"] >= base])


def write_tokenizer(directory: Path, tokenizer: dict[str, object]) -> None:
    """Writes `tokenizer.json` into `directory`."""
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
