"""From an entry of a `tokenizer.json` vocabulary to the bytes it stands for.

Two ways of writing bytes are in use: *byte-level* (GPT-2: every byte has a printable character) and *byte fallback*
(`<0x0A>` is one byte). What else there is to an entry (`▁` for a space, `##`, `</w>`) the file's own decoder knows.
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
_NEIGHBOUR: Final = "x"


def _byte_table() -> dict[int, int | None]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes in their order from U+0100 on.

    Byte 0 is dropped, as Ollama does it.
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
    """The text itself."""
    return piece.encode("utf-8", "replace")


def byte_level_bytes(piece: str) -> bytes:
    """Characters mapped back to bytes; an entry with any other character stands for its own text."""
    if not _ALPHABET.issuperset(piece):
        return plain_bytes(piece)
    return piece.translate(_BYTES).encode("latin-1")


def spaced_bytes(piece: str) -> bytes:
    """A word of a vocabulary of words."""
    return plain_bytes(f" {piece}")


def fallback_byte(piece: str) -> bytes | None:
    """The byte that `<0xNN>` stands for; None for another text."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def bytes_by_decoder(decoder: Decoder, *, byte_fallback: bool) -> PieceDecoder:
    """Let `decoder` read each piece between two neighbours; what it does at the ends of a text is left out.

    So a token's bytes do not depend on where it stands: the space before the first word belongs to the answer, and a
    word that ends (`</w>`) is followed by a space.
    """
    pair = decoder.decode([_NEIGHBOUR] * 2)
    after = len(pair) - len(_NEIGHBOUR)  # WordPiece sets a space before a neighbour

    def decode(piece: str) -> bytes:
        if byte_fallback and (byte := fallback_byte(piece)) is not None:
            return byte
        return plain_bytes(decoder.decode([_NEIGHBOUR, piece, _NEIGHBOUR])[len(_NEIGHBOUR) : -after])

    return decode


def piece_decoder(backend: tokenizers.Tokenizer, *, byte_fallback: bool) -> PieceDecoder:
    """Choose by the file's decoder; without one, by its pre-tokenizer and the kind of its model."""
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
    """The types of a component and of those inside it, by the library's own account of it."""
    types: set[str] = set()
    parts = [json.loads(component.__getstate__())] if component is not None else []
    while parts:
        part = parts.pop()
        types.add(part["type"])
        parts += [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return types
