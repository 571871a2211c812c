"""The backend for `tokenizer.model`, read by sentencepiece."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from runner.errors import ModelError
from runner.logs import Log
from runner.tokenizer.added_tokens import AddedToken, configured_tokens, literal_pattern
from runner.tokenizer.model_files import Files, JsonObject, read_object
from runner.tokenizer.model_proto import FILE, ModelProto, PieceType, parse_model, without_dummy_prefix
from runner.tokenizer.piece_bytes import fallback_byte, plain_bytes

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

log = Log(__name__)

CONVERT: Final = "transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes a tokenizer.json"
_TIKTOKEN: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_SPACE_MARK: Final = "▁"
_WORD: Final = re.compile(r"\w")


class TokenizerModel:
    """A sentencepiece vocabulary, with the tokens that the configs beside the file add.

    Text is split at every added token and control symbol. sentencepiece encodes the parts between these, with the
    user-defined symbols in them; normalization, prefix and bytes are as in training.

    Many models put a space before a text (`add_dummy_prefix`). If added tokens split the text, a space is put before
    every part, as by Hugging Face's tokenizers. With `"legacy": false` in `tokenizer_config.json`, it is put only
    before the whole text; with `"add_prefix_space": false`, nowhere.
    """

    file = FILE

    def __init__(self, data: bytes, files: Files, *, literal: bool) -> None:
        """With `literal`, added tokens match by their texts, without flags. Raises ModelError if the file or a config
        is broken."""
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
        ends = {"bos_token": self._first.bos_id(), "eos_token": self._first.eos_id()}
        self.own: JsonObject = {role: self._piece(piece_id) for role, piece_id in ends.items()}
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
        """Returns control symbols and the unknown token, then the configured tokens. Configured tokens replace symbols
        with the same id or text."""
        configured = configured_tokens(files, self._piece_id, len(self.pieces))
        ids, texts = {token.id for token in configured}, {token.content for token in configured}
        replaced = [token for token in configured if self._piece(token.id) not in (None, token.content)]
        if replaced:
            (token_id, text, *_), count, what = replaced[0], len(replaced), "added tokens replace other pieces"
            log.warning(what, file=FILE, count=count, id=token_id, token=text, piece=self._piece(token_id) or "")
        marks = [
            AddedToken(piece_id, text, special=True)
            for piece_id, (kind, text) in proto.marked.items()
            if kind in (PieceType.CONTROL, PieceType.UNKNOWN) and piece_id not in ids and text not in texts
        ]
        return [*marks, *configured]

    def _piece(self, piece_id: int) -> str | None:
        return self.pieces[piece_id] if 0 <= piece_id < len(self.pieces) else None

    def _piece_id(self, text: str) -> int | None:
        piece_id: int = self._first.piece_to_id(text)  # the unknown token's id if there is no such piece
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
        """Encodes a text between two added tokens. The text begins at position `at` of the whole prompt."""
        return (self._later if at else self._first).encode(text) if text else []  # releases the GIL

    def token_bytes(self, token_id: int) -> bytes:
        added = self._by_id.get(token_id)
        if added is not None:
            return plain_bytes(added.content if added.special else added.content.replace(_SPACE_MARK, " "))
        piece = self._piece(token_id) or ""
        if piece and self._first.is_byte(token_id):
            return fallback_byte(piece) or b""
        return plain_bytes(piece.replace(_SPACE_MARK, " "))


def _is_within_a_word(text: str, start: int, end: int) -> bool:
    return bool(_WORD.fullmatch(text[start - 1 : start]) or _WORD.fullmatch(text[end : end + 1]))


def _load(data: bytes) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor  # the import takes 20 ms, and few models need it

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
