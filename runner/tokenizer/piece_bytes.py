"""Decodes the entries (pieces) of a `tokenizer.json` vocabulary into bytes.

Pieces write bytes in two ways: *byte-level* (GPT-2: every byte has a printable character) and *byte fallback* (`<0x0A>`
is one byte). The decoder in the file handles all other marks (`▁` for a space, `##`, `</w>`).

The steps before the model (normalizer and pre-tokenizer) spell the pieces, so they decide the meaning of a piece. The
file's decoder is used unless it does not reverse these steps: transformers' class for another model may have saved the
file, with the decoder of that class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

from runner.errors import PanicError, panics_as

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.decoders import Decoder
    from tokenizers.models import Model
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

PieceDecoder = Callable[[str], bytes]
Step = TypeVar("Step")

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BEFORE, _AFTER = "\ue000", "\ue001"
_SPACE_MARK: Final = "▁"
_WORDS: Final = "x y"


def _byte_table() -> dict[int, int | None]:
    """Returns GPT-2's table from characters to bytes: printable Latin-1 stands for itself, and the characters from
    U+0100 on stand for the other bytes, in order. The character of byte 0 is dropped, as in Ollama."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table: dict[int, int | None] = {byte: byte for byte in printable}
    table.update((0x100 + place, byte) for place, byte in enumerate(others))
    table[0x100] = None
    return table


_BYTES: Final = _byte_table()
_ALPHABET: Final = frozenset(map(chr, _BYTES))
_LETTERS_OF_UTF8: Final = [
    chr(key) for key, byte in _BYTES.items() if byte in {0x20, *range(0x80, 0xC0), *range(0xC2, 0xF5)}
]


def plain_bytes(piece: str) -> bytes:
    """Returns the piece's own text in UTF-8."""
    return piece.encode("utf-8", "replace")


def byte_level_bytes(piece: str) -> bytes:
    """Maps the characters of a byte-level piece to bytes. A piece with any other character stands for its own text."""
    if not _ALPHABET.issuperset(piece):
        return plain_bytes(piece)
    return piece.translate(_BYTES).encode("latin-1")


def fallback_byte(piece: str) -> bytes | None:
    """Returns the byte of a piece `<0xNN>`, or None for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def bytes_by_decoder(decoder: Decoder, *, byte_fallback: bool) -> PieceDecoder:
    """Returns a function that decodes pieces with `decoder`, each between two other pieces.

    So the bytes of a token do not depend on its position, although some decoders treat the ends of a text differently:
    a space before the first word of an answer stays, and the end of a word (`</w>`) is a space.
    """
    after = len(decoder.decode([_BEFORE, _AFTER])) - len(_BEFORE)  # WordPiece puts a space before a word

    def decode(piece: str) -> bytes:
        if byte_fallback and (byte := fallback_byte(piece)) is not None:
            return byte
        return plain_bytes(decoder.decode([_BEFORE, piece, _AFTER])[len(_BEFORE) : -after])

    return decode


class PieceDecoding(NamedTuple):
    """A function that decodes pieces into bytes. With `byte_level`, pieces have a printable character for each byte."""

    decode: PieceDecoder
    byte_level: bool = False


def piece_decoding(backend: tokenizers.Tokenizer, *, byte_fallback: bool) -> PieceDecoding:
    """Chooses a decoding: byte-level if a step before the model is; else by the file's decoder, unless this does not
    reverse the steps; else by the type of the model."""
    words = _words(backend)
    if _is_byte_level(backend):
        return PieceDecoding(_byte_level_decoder(backend.model, words), byte_level=True)
    usual = PieceDecoding(_decoder_of_model(backend.model, words, byte_fallback=byte_fallback))
    if backend.decoder is None:
        return usual
    types = _types(backend.decoder)
    by_file = bytes_by_decoder(backend.decoder, byte_fallback=byte_fallback or "ByteFallback" in types)
    found = PieceDecoding(byte_level_bytes, byte_level=True) if "ByteLevel" in types else PieceDecoding(by_file)
    suffix = getattr(backend.model, "end_of_word_suffix", None) or ""

    def gives_back(pieces: PieceDecoding) -> bool:
        return b"".join(pieces.decode(word + suffix) for word in words).split() == plain_bytes(_WORDS).split()

    return usual if gives_back(usual) and not gives_back(found) else found


def _words(backend: tokenizers.Tokenizer) -> list[str]:
    """Returns the words of a text of two words, as the steps before the model spell them. Returns an empty list if a
    step panics: it then panics for every text."""
    steps, text = backend.pre_tokenizer, _WORDS
    try:
        with panics_as(PanicError):
            text = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
            return [word for word, _ in steps.pre_tokenize_str(text)] if steps is not None else [text]
    except PanicError:
        return []


def _byte_level_decoder(model: Model, words: Sequence[str]) -> PieceDecoder:
    """Returns a function that removes the model's marks for parts and ends of words from a piece, and returns the
    `byte_level_bytes` of the rest."""
    prefix = getattr(model, "continuing_subword_prefix", None) or ""
    suffix = getattr(model, "end_of_word_suffix", None) or ""
    if not prefix and not suffix:
        return byte_level_bytes
    end = b"" if b" " in b"".join(map(byte_level_bytes, words)) else b" "  # CLIP's steps remove spaces

    def decode(piece: str) -> bytes:
        word = piece.removesuffix(suffix)
        return byte_level_bytes(word.removeprefix(prefix)) + (end if word != piece else b"")

    return decode


def _decoder_of_model(model: Model, words: Sequence[str], *, byte_fallback: bool) -> PieceDecoder:
    from tokenizers import decoders, models

    between = re.search(r"x ?([^ ]+?)\1*y", "".join(words))
    mark = between[1] if between else ""
    if isinstance(model, models.Unigram) or byte_fallback or mark:
        return bytes_by_decoder(decoders.Replace(mark or _SPACE_MARK, " "), byte_fallback=byte_fallback)
    if isinstance(model, models.WordPiece):
        return bytes_by_decoder(decoders.WordPiece(model.continuing_subword_prefix, cleanup=False), byte_fallback=False)
    if isinstance(model, models.BPE):
        suffix = model.end_of_word_suffix
        return bytes_by_decoder(decoders.BPEDecoder(suffix), byte_fallback=False) if suffix else plain_bytes
    return lambda word: plain_bytes(f" {word}")


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Returns True if a step before the model spells bytes by printable characters."""
    return "ByteLevel" in _types(backend.normalizer) | _types(backend.pre_tokenizer)


def restore_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Adds the byte-level step if a vocabulary needs it and the file lacks it. Returns True if the step was added.

    transformers' class for Llama saved such vocabularies (distillations of DeepSeek-R1) with the steps of Llama. These
    steps mark spaces by `▁`, for which the vocabulary has no piece, so that spaces are lost.
    """
    from tokenizers import models, normalizers, pre_tokenizers

    if _is_byte_level(backend) or not isinstance(backend.model, models.BPE) or not _spells_bytes(backend):
        return False
    kept = [step for step in _steps(backend.normalizer) if _SPACE_MARK not in step.normalize_str(_WORDS)]
    backend.normalizer = normalizers.Sequence(kept) if kept else None
    splits = [step for step in _steps(backend.pre_tokenizer) if not isinstance(step, pre_tokenizers.Metaspace)]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, spell])
    return True


def _spells_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Returns True for a vocabulary with the characters of UTF-8's bytes and without `▁`. A vocabulary with `▁` (Gemma)
    may have these characters as Latin letters."""
    known = backend.token_to_id
    return known(_SPACE_MARK) is None and all(known(letter) is not None for letter in _LETTERS_OF_UTF8)


def _steps(component: Step | None) -> list[Step]:
    """Returns the steps of a normalizer or pre-tokenizer: its parts if it is a sequence."""
    if hasattr(component, "__getitem__"):
        return [*cast("Iterable[Step]", component)]
    return [] if component is None else [component]


def _types(component: Decoder | Normalizer | PreTokenizer | None) -> set[str]:
    """Returns the types of a component and of its parts, as the library serializes them."""
    types: set[str] = set()
    parts = [json.loads(component.__getstate__())] if component is not None else []
    while parts:
        part = parts.pop()
        types.add(part["type"])
        parts += [*part.get("decoders", ()), *part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return types
