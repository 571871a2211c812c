"""The backend for `tokenizer.model`, read by sentencepiece.

The library does not expose a few fields of the file, so these are parsed here. Its own `sentencepiece_model_pb2` would
do that, too, but takes 17 ms to import, and refuses any protobuf older than the one that it was generated with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from runner.errors import ModelError
from runner.logs import Log
from runner.tokenizer.added_tokens import AddedToken, configured_tokens, literal_pattern
from runner.tokenizer.model_files import Files, JsonObject, read_object
from runner.tokenizer.piece_bytes import fallback_byte, plain_bytes

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

log = Log(__name__)

FILE: Final = "tokenizer.model"
CONVERT: Final = "transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes a tokenizer.json"
_TIKTOKEN: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_SPACE_MARK: Final = "▁"
_WORD: Final = re.compile(r"\w")


class TokenizerModel:
    """A sentencepiece vocabulary, with the tokens that the configs beside it add.

    Text is split at every added token and control symbol. The parts between go to sentencepiece, including user-defined
    symbols, which are the model's own; normalization, prefix and bytes are as in training.

    Many models put a space before a text (`add_dummy_prefix`). Where added tokens split the text, Hugging Face's
    tokenizers do so before every part; with `"legacy": false` in `tokenizer_config.json`, only at the very beginning;
    with `"add_prefix_space": false`, nowhere.
    """

    file = FILE

    def __init__(self, data: bytes, files: Files, *, literal: bool) -> None:
        """With `literal`, each added token is matched by its text alone. Raises ModelError if the file or a config is
        broken."""
        if _TIKTOKEN.match(data):
            raise ModelError(f"parse tokenizer: {FILE}: a tiktoken file; {CONVERT}")
        proto = parse_model(data)
        self.kind = f"sentencepiece {proto.algorithm}"
        self._first = self._later = _load(data)
        config = read_object(files, "tokenizer_config.json")
        if proto.dummy_prefix and (config.get("legacy") is False or config.get("add_prefix_space") is False):
            self._later = _load(without_dummy_prefix(data))
            if config.get("add_prefix_space") is False:
                self._first = self._later
        self.pieces = _pieces(self._first)
        self.own: JsonObject = {
            "bos_token": self._piece(self._first.bos_id()),
            "eos_token": self._piece(self._first.eos_id()),
        }
        self.added = self._added_tokens(proto, files)
        self.size = max([len(self.pieces), *(token.id + 1 for token in self.added)])
        self._by_id = {token.id: token for token in self.added}
        self._by_text = {token.content: token.literal if literal else token for token in self.added}
        symbols = [text for kind, text in proto.marked.values() if kind == PieceType.USER_DEFINED]
        try:
            self._pattern = literal_pattern([*self._by_text, *symbols])
        except RecursionError as error:
            raise ModelError(f"parse tokenizer: {FILE}: too many added tokens that begin with one another") from error

    def _added_tokens(self, proto: ModelProto, files: Files) -> list[AddedToken]:
        """Returns control symbols and the unknown token, then the configured tokens, which override them."""
        configured = configured_tokens(files, self._piece_id, len(self.pieces))
        ids, texts = {token.id for token in configured}, {token.content for token in configured}
        replaced = [token for token in configured if self._piece(token.id) not in (None, token.content)]
        if replaced:
            log.warning(
                "added tokens replace other pieces",
                file=FILE,
                count=len(replaced),
                id=replaced[0].id,
                token=replaced[0].content,
                piece=self._piece(replaced[0].id) or "",
            )
        marks = [
            AddedToken(piece_id, text, special=True)
            for piece_id, (kind, text) in proto.marked.items()
            if kind in (PieceType.CONTROL, PieceType.UNKNOWN) and piece_id not in ids and text not in texts
        ]
        return [*marks, *configured]

    def _piece(self, piece_id: int) -> str | None:
        return self.pieces[piece_id] if 0 <= piece_id < len(self.pieces) else None

    def _piece_id(self, text: str) -> int | None:
        piece_id: int = self._first.piece_to_id(text)  # the id of the unknown token if there is no such piece
        return piece_id if self._piece(piece_id) == text else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            token = self._by_text.get(match[0])
            if token is None:  # a user-defined symbol
                continue
            if token.single_word and _is_within_a_word(text, *match.span()):
                continue
            before = text[start : match.start()]
            ids += self._encode_plain(before.rstrip() if token.lstrip else before, at=start)
            ids.append(token.id)
            start = match.end()
            while token.rstrip and text[start : start + 1].isspace():
                start += 1
        return ids + self._encode_plain(text[start:], at=start)

    def _encode_plain(self, text: str, *, at: int) -> list[int]:
        """Encodes the text between two added tokens, which begins at position `at` of the whole text."""
        if not text:
            return []
        ids: list[int] = (self._later if at else self._first).encode(text)  # releases the GIL
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        added = self._by_id.get(token_id)
        if added is not None and added.special:
            return plain_bytes(added.content)
        piece = added.content if added is not None else self._piece(token_id)
        if piece is None:
            return b""
        if added is None and self._first.is_byte(token_id):
            return fallback_byte(piece) or b""
        return plain_bytes(piece.replace(_SPACE_MARK, " "))


def _is_within_a_word(text: str, start: int, end: int) -> bool:
    return bool(_WORD.fullmatch(text[start - 1 : start]) or _WORD.fullmatch(text[end : end + 1]))


def _load(data: bytes) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor  # takes 20 ms, and few models have such a file

    processor = SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(data)
    except (RuntimeError, OSError) as error:
        raise ModelError(f"parse tokenizer: {FILE}: {error}") from error
    return processor


def _pieces(processor: SentencePieceProcessor) -> list[str]:
    try:
        return processor.id_to_piece(list(range(processor.get_piece_size())))
    except UnicodeDecodeError as error:
        raise ModelError(f"parse tokenizer: {FILE}: a piece is not UTF-8: {error}") from error


# --- The fields of a `tokenizer.model` that the library does not expose.

_VARINT, _BYTES = 0, 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT_KEY: Final = bytes([1 << 3 | _BYTES])
_SCORE_KEY: Final = 2 << 3 | 5
_ALGORITHMS: Final = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


class PieceType(IntEnum):
    """`ModelProto.SentencePiece.Type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelProto(NamedTuple):
    """`marked` has every piece that is not ordinary text, by id."""

    algorithm: str
    dummy_prefix: bool
    marked: dict[int, tuple[PieceType, str]]


def parse_model(data: bytes) -> ModelProto:
    """Raises ModelError if the file is empty, truncated, or not a sentencepiece model."""
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
    if not seen.issuperset(
        (_PIECE, _TRAINER, _NORMALIZER)
    ):  # they come in this order, and a truncated file may end between two
        raise _not_a_model(len(data))
    return ModelProto(algorithm, dummy_prefix, marked)


def _not_a_model(size: int) -> ModelError:
    return ModelError(f"parse tokenizer: {FILE}: not a sentencepiece model, or only a part of one ({size} bytes)")


def without_dummy_prefix(data: bytes) -> bytes:
    """Returns the model with `add_dummy_prefix` off: of two values of a field, the later one wins."""
    return data + bytes([_NORMALIZER << 3 | _BYTES, 2, 3 << 3 | _VARINT, 0])


def _is_ordinary(message: bytes) -> bool:
    """Returns True for a piece with a text, a score and no type. A shortcut, since there may be 256,000 of them."""
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
    """Returns the last value of the numeric field `number` of a message."""
    values = [_varint(value, 0)[0] for found, value in _fields(message) if found == number]
    return values[-1] if values else default


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the fields of a message: number and raw value.

    Raises ValueError, IndexError or KeyError if the message is truncated or malformed.
    """
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
    """Returns a number and the position after it."""
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
