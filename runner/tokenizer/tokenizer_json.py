"""The backend for `tokenizer.json`, read by Hugging Face's tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from runner.errors import ModelError
from runner.logs import Log
from runner.tokenizer.added_tokens import AddedToken
from runner.tokenizer.files import JsonObject
from runner.tokenizer.json_document import FILE, parse_document, repaired, with_vocabulary_ids
from runner.tokenizer.piece_bytes import byte_level_bytes, piece_decoder, plain_bytes

if TYPE_CHECKING:
    import tokenizers

log = Log(__name__)


class TokenizerJson:
    """A vocabulary of any type that the library knows: BPE, Unigram, WordPiece, WordLevel."""

    file = FILE
    own: ClassVar[JsonObject] = {}

    def __init__(self, data: bytes) -> None:
        """Raises ModelError for a broken file."""
        document = parse_document(data)
        if document.needs_repair:
            data = repaired(data)
        self.added = document.added
        self._backend = _build(data)
        if self._moved():
            self._backend = _build(with_vocabulary_ids(data, self.added))
        if moved := self._moved():
            first = moved[0]
            log.warning(
                "added tokens get other ids than in the file",
                file=FILE,
                count=len(moved),
                token=first.content,
                id=first.id,
            )
        self.kind = type(self._backend.model).__name__
        self._added = {token.id: token for token in self.added}
        self._decode_piece = piece_decoder(self._backend, byte_fallback=document.model.byte_fallback is True)

    def _moved(self) -> list[AddedToken]:
        """Returns the added tokens that the library has given another id than the file."""
        return [token for token in self.added if token.content and self._backend.token_to_id(token.content) != token.id]

    @cached_property
    def size(self) -> int:
        return max([*self._backend.get_vocab().values(), *self._added], default=-1) + 1

    @property
    def pieces(self) -> Iterator[str]:
        # One by one: a single call for all would hold the GIL for a tenth of a second.
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=False)):
            yield self._backend.id_to_token(token_id) or ""

    def encode(self, text: str) -> list[int]:
        # Only the batch call releases the GIL (a long prompt takes 0.3 s); `fast` omits the offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return self._added_bytes(added)
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return b"" if piece is None else self._decode_piece(piece)

    def _added_bytes(self, token: AddedToken) -> bytes:
        """Returns the bytes of an added token: its own text, in any script.

        Vocabularies that are not byte-level list ordinary entries among the added tokens (Gemma: `▁▁`, an indent of
        two). There, tokens that are not special are decoded like pieces.
        """
        if token.special or self._decode_piece is byte_level_bytes:
            return plain_bytes(token.content)
        return self._decode_piece(token.content)


def _build(data: bytes) -> tokenizers.Tokenizer:
    import tokenizers  # 10 to 30 ms, not needed before a model is opened

    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ModelError(f"parse tokenizer: {FILE}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    if isinstance(backend.model, tokenizers.models.BPE):
        backend.model.dropout = None  # for training only; a prompt must have the same tokens every time
    return backend
