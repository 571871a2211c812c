"""Decodes an entry of a `tokenizer.json` vocabulary into bytes.

Bytes are written in two ways: *byte-level* (GPT-2: every byte has a printable character) and *byte fallback* (`<0x0A>`
is one byte). All other markers (`▁` for a space, `##`, `</w>`) are left to the file's own decoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.decoders import Decoder
    from tokenizers.pre_tokenizers import PreTokenizer

PieceDecoder = Callable[[str], bytes]

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROUNDING: Final = "x"


def _byte_table() -> dict[int, int | None]:
    """Returns GPT-2's table: printable Latin-1 stands for itself, other bytes follow in order from U+0100 on.

    Byte 0 is dropped, as in Ollama.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table: dict[int, int | None] = {byte: byte for byte in printable}
    table.update((0x100 + place, byte) for place, byte in enumerate(others))
    table[0x100] = None
    return table


_BYTES: Final = _byte_table()
_ALPHABET: Final = frozenset(map(chr, _BYTES))


def plain_bytes(piece: str) -> bytes:
    """Returns the text itself in UTF-8."""
    return piece.encode("utf-8", "replace")


def byte_level_bytes(piece: str) -> bytes:
    """Maps characters back to bytes; an entry with any other character stands for its own text."""
    if not _ALPHABET.issuperset(piece):
        return plain_bytes(piece)
    return piece.translate(_BYTES).encode("latin-1")


def spaced_bytes(piece: str) -> bytes:
    """Returns an entry of a vocabulary of words, with a space before it."""
    return plain_bytes(f" {piece}")


def fallback_byte(piece: str) -> bytes | None:
    """Returns the byte of `<0xNN>`; None for other texts."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def bytes_by_decoder(decoder: Decoder, *, byte_fallback: bool) -> PieceDecoder:
    """Returns a function that decodes pieces with `decoder`, each between two other pieces.

    Thus a token's bytes do not depend on its position, where a decoder treats the ends of a text differently: the space
    before the first word belongs to the answer, and the end of a word (`</w>`) is a space.
    """
    pair = decoder.decode([_SURROUNDING] * 2)
    after = len(pair) - len(_SURROUNDING)  # WordPiece puts a space before a word

    def decode(piece: str) -> bytes:
        if byte_fallback and (byte := fallback_byte(piece)) is not None:
            return byte
        return plain_bytes(decoder.decode([_SURROUNDING, piece, _SURROUNDING])[len(_SURROUNDING) : -after])

    return decode


def piece_decoder(backend: tokenizers.Tokenizer, *, byte_fallback: bool) -> PieceDecoder:
    """Chooses a decoding by the file's decoder; without one, by its pre-tokenizer and the type of its model."""
    from tokenizers import decoders, models

    decoder, model = backend.decoder, backend.model
    if decoder is not None:
        types = _types(decoder)
        if "ByteLevel" in types:
            return byte_level_bytes
        return bytes_by_decoder(decoder, byte_fallback=byte_fallback or "ByteFallback" in types)
    types = _types(backend.pre_tokenizer)
    if "ByteLevel" in types:
        return byte_level_bytes
    if isinstance(model, models.Unigram) or "Metaspace" in types or byte_fallback:
        return bytes_by_decoder(decoders.Metaspace(), byte_fallback=byte_fallback)
    if isinstance(model, models.WordPiece):
        return bytes_by_decoder(decoders.WordPiece(model.continuing_subword_prefix, cleanup=False), byte_fallback=False)
    if isinstance(model, models.BPE):
        suffix = model.end_of_word_suffix
        return bytes_by_decoder(decoders.BPEDecoder(suffix), byte_fallback=False) if suffix else byte_level_bytes
    return spaced_bytes


def _types(component: Decoder | PreTokenizer | None) -> set[str]:
    """Returns the types of a component and of those inside it, as the library serializes them."""
    types: set[str] = set()
    parts = [json.loads(component.__getstate__())] if component is not None else []
    while parts:
        part = parts.pop()
        types.add(part["type"])
        parts += [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return types
