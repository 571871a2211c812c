"""The fields of a `tokenizer.model` that sentencepiece does not expose.

sentencepiece's own `sentencepiece_model_pb2` could parse them, but its import takes 17 ms, and fails with a protobuf
older than the release that generated this module.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from runner.errors import ModelError

FILE: Final = "tokenizer.model"
_VARINT, _BYTES = 0, 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT_KEY: Final = bytes([1 << 3 | _BYTES])
_SCORE_KEY: Final = 2 << 3 | 5
_ALGORITHMS: Final = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


class PieceType(IntEnum):
    """sentencepiece's `ModelProto.SentencePiece.Type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelProto(NamedTuple):
    """The parts of the file that the runner needs. `marked` has every piece that is not ordinary text, by id."""

    algorithm: str
    dummy_prefix: bool
    marked: dict[int, tuple[PieceType, str]]


def parse_model(data: bytes) -> ModelProto:
    """Parses the file. Raises ModelError if the file is empty, truncated, or not a sentencepiece model."""
    algorithm, dummy_prefix = _ALGORITHMS[1], True
    marked: dict[int, tuple[PieceType, str]] = {}
    pieces, seen = 0, set()
    try:
        for number, message in _fields(data):
            seen.add(number)
            if number == _PIECE:
                if not _is_ordinary(message):
                    kind, text = _piece(message)
                    if kind != PieceType.NORMAL:
                        marked[pieces] = kind, text
                pieces += 1
            elif number == _TRAINER:
                algorithm = _ALGORITHMS[_number(message, 3, 1)]
            elif number == _NORMALIZER:
                dummy_prefix = _number(message, 3, int(dummy_prefix)) != 0
    except (ValueError, IndexError, KeyError) as error:
        raise _not_a_model(len(data)) from error
    if not seen.issuperset((_PIECE, _TRAINER, _NORMALIZER)):  # in this order; the file may be cut between two
        raise _not_a_model(len(data))
    return ModelProto(algorithm, dummy_prefix, marked)


def _not_a_model(size: int) -> ModelError:
    return ModelError(f"parse tokenizer: {FILE}: not a sentencepiece model, or only a part of one ({size} bytes)")


def without_dummy_prefix(data: bytes) -> bytes:
    """Returns the model with `add_dummy_prefix` off, by a second value for this field: the last value counts."""
    return data + bytes([_NORMALIZER << 3 | _BYTES, 2, 3 << 3 | _VARINT, 0])


def _is_ordinary(message: bytes) -> bool:
    """Returns True for a piece with a text, a score and no type. Saves parsing most of up to 256,000 pieces."""
    end = message[1] + 2 if len(message) > 1 else 0
    return message[0:1] == _TEXT_KEY and len(message) == end + 5 < 0x80 and message[end] == _SCORE_KEY


def _piece(message: bytes) -> tuple[PieceType, str]:
    kind, text = int(PieceType.NORMAL), b""
    for number, value in _fields(message):
        if number == 1:
            text = value
        elif number == 3:
            kind = _varint(value, 0)[0]
    return PieceType(kind), text.decode()


def _number(message: bytes, number: int, default: int) -> int:
    """Returns the last value of the numeric field `number` of a message, or `default`."""
    values = [_varint(value, 0)[0] for found, value in _fields(message) if found == number]
    return values[-1] if values else default


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the fields of a message: the field's number and its raw value. Raises ValueError, IndexError or KeyError
    if the message is truncated or malformed."""
    at, size = 0, len(data)
    while at < size:
        key, start = _varint(data, at)
        if key & 7 == _BYTES:
            length, start = _varint(data, start)
            at = start + length
        elif key & 7 == _VARINT:
            _, at = _varint(data, start)
        else:
            at = start + _FIXED_BYTES[key & 7]
        if at > size:
            raise ValueError("a field reaches beyond the end")
        yield key >> 3, data[start:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that is encoded at position `at`, and the position after it."""
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, 64, 7):
        at += 1
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
    raise ValueError("a number without an end")
