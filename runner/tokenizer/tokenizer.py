"""Text to ids, ids to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.errors import ModelError
from runner.logs import Log
from runner.tokenizer import utf8
from runner.tokenizer.document import (
    FILE,
    AddedToken,
    Document,
    parse_document,
    with_literal_added_tokens,
    with_vocabulary_ids,
)
from runner.tokenizer.files import Files
from runner.tokenizer.pieces import PieceDecoder, byte_level_piece, piece_decoder, plain_piece
from runner.tokenizer.specials import SpecialIds, resolve_special_ids

if TYPE_CHECKING:
    import tokenizers

log = Log(__name__)


class Tokenizer:
    """A model's vocabulary, used by every request of the process.

    Nothing changes after construction but two caches of decoded entries, so any thread may call any method at any time.
    """

    def __init__(self, backend: tokenizers.Tokenizer, document: Document, special: SpecialIds) -> None:
        self._backend = backend
        self._added = {token.id: token for token in document.added_tokens}
        self._decode_piece: PieceDecoder = piece_decoder(document)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.bos = special.bos
        self.eos = special.eos
        self.add_bos = special.add_bos
        self.special = frozenset(token.id for token in document.added_tokens if token.special)
        """The added special tokens, which chat templates set around messages."""
        self.vocab_size = max([backend.get_vocab_size(), *(token_id + 1 for token_id in self._added)])
        """Number of ids, gaps that added tokens leave included."""

    def encode(self, text: str) -> list[int]:
        """Tokenize a rendered prompt.

        The spelling of an added token becomes its id wherever it stands, the longest at a place; no template is
        applied; BOS comes in front iff the model asks for it, even if the text begins with one. Other threads run
        meanwhile.
        """
        try:
            ids = self._encode(text)
        except TypeError:  # lone surrogates have no UTF-8
            ids = self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return [self.bos, *ids] if self.add_bos and self.bos is not None else ids

    def _encode(self, text: str) -> list[int]:
        # The batch call is the one that gives up the GIL (a long prompt takes 0.3 s); `fast` leaves out the offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the output, often part of a character; empty for an id outside the table."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._read_bytes(token_id)
        return data

    def _read_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return self._added_bytes(added)
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if piece is None else self._decode_piece(piece)

    def _added_bytes(self, token: AddedToken) -> bytes:
        """An added token stands for its own text, in any script.

        Only in a SentencePiece vocabulary are ordinary entries listed among them (Gemma: `▁▁`, the indent of two): what
        is not marked special is read as a piece there.
        """
        if token.special or self._decode_piece is byte_level_piece:
            return plain_piece(token.content)
        return self._decode_piece(token.content)

    def token_text(self, token_id: int) -> str:
        """The token decoded alone, one U+FFFD for each byte of an incomplete character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = utf8.decode(self.token_bytes(token_id))
        return text


def open_tokenizer(files: Files) -> Tokenizer:
    """Open the model's `tokenizer.json`, with BOS and EOS from the configs beside it.

    Raises:
        ModelError: the file is missing, or one of the files is broken; the text names it.
    """
    data = files(FILE)
    if data is None:
        raise ModelError(f'load tokenizer config: config "{FILE}" not found in manifest')
    document = parse_document(data)
    if not all(token.literal for token in document.added_tokens):
        data = with_literal_added_tokens(data)
    backend = _build(data)
    if moved := _moved(backend, document):
        if document.model.type in {"BPE", "WordLevel", "WordPiece"}:
            backend = _build(with_vocabulary_ids(data, document.added_tokens))
            moved = _moved(backend, document)
        for token in moved:
            log.warning("an added token is read as another one", file=FILE, token=token.content, id=token.id)
    special = resolve_special_ids(files, {token.content: token.id for token in document.added_tokens})
    return Tokenizer(backend, document, special)


def _build(data: bytes) -> tokenizers.Tokenizer:
    import tokenizers  # 10 to 30 ms, not needed before a model is opened

    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except ValueError as error:
        raise ModelError(f"parse tokenizer: {FILE}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _moved(backend: tokenizers.Tokenizer, document: Document) -> list[AddedToken]:
    """The added tokens whose text does not lead to the id that the file gives them."""
    return [t for t in document.added_tokens if t.content and backend.token_to_id(t.content) != t.id]
