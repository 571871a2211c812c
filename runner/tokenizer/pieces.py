"""From an entry of the vocabulary to the bytes it stands for.

Three ways of writing are in use: *byte-level* (GPT-2: every byte has a printable character), *SentencePiece* (`▁` is a
space, `<0x0A>` a byte), and *plain* (the entry is the text).
"""

import re
from collections.abc import Callable, Iterator
from typing import Final

from runner.tokenizer.document import Component, Document

PieceDecoder = Callable[[str], bytes]

_SPACE_MARK: Final = "▁"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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


def plain_piece(piece: str) -> bytes:
    """The text itself."""
    return piece.encode("utf-8", "replace")


def byte_level_piece(piece: str) -> bytes:
    """Characters mapped back to bytes; an entry with any other character stands for its own text."""
    if not _ALPHABET.issuperset(piece):
        return plain_piece(piece)
    return piece.translate(_BYTES).encode("latin-1")


def sentencepiece_piece(replacements: tuple[tuple[str, str], ...]) -> PieceDecoder:
    """Make the decoder that applies `replacements`, in order, and reads `<0xNN>` as one byte."""

    def decode(piece: str) -> bytes:
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return plain_piece(piece)

    return decode


def _replacements(component: Component) -> Iterator[tuple[str, str]]:
    for part in component.flat():
        if part.type == "Replace" and part.pattern and part.pattern.string:
            yield part.pattern.string, part.content or ""
        elif part.type == "Metaspace":
            yield part.replacement or _SPACE_MARK, " "


def _types(component: Component | None) -> set[str]:
    return {part.type for part in component.flat()} if component else set()


def piece_decoder(document: Document) -> PieceDecoder:
    """Choose by the decoder; without one, by the pre-tokenizer and the kind of the model.

    Steps that look at the whole text (`Strip` of the first space, clean-up) are left out: a token's bytes do not depend
    on its neighbours, and the space before the first word belongs to the answer.
    """
    decoders = _types(document.decoder)
    if "ByteLevel" in decoders:
        return byte_level_piece
    if document.decoder and decoders & {"Replace", "Metaspace", "ByteFallback"}:
        return sentencepiece_piece(tuple(_replacements(document.decoder)))
    if decoders:
        return plain_piece
    if "Metaspace" in _types(document.pre_tokenizer):
        return sentencepiece_piece(((_SPACE_MARK, " "),))
    return byte_level_piece if document.model.type == "BPE" else plain_piece
