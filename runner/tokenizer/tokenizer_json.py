"""The backend for `tokenizer.json`, read by Hugging Face's tokenizers.

The runner itself needs few parts of the file, which may have 30 MB: it parses only these, and skips the vocabulary and
the merges. Files that the library misreads are repaired first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import msgspec
from msgspec.structs import astuple

from runner.errors import ModelError, PanicError, panics_as
from runner.logs import Log
from runner.tokenizer.added_tokens import FLAGS, AddedToken, configured_tokens
from runner.tokenizer.model_files import Files, JsonObject
from runner.tokenizer.piece_bytes import piece_decoding, plain_bytes, restore_byte_level

if TYPE_CHECKING:
    import tokenizers

log = Log(__name__)
FILE = "tokenizer.json"
_WIDEST_GAP = 1 << 17
"""The most ids between the vocabulary and the last added token. Each of them needs an entry."""
_MODELS = frozenset({None, "BPE", "Unigram", "WordLevel", "WordPiece"})


def _broken(why: str) -> ModelError:
    return ModelError(f"parse tokenizer: {FILE}: {why}")


def _failed(why: str) -> PanicError:
    return PanicError(f"the tokenizers library failed with this model's {FILE}: {why}")


class TokenizerJson:
    """A vocabulary in a `tokenizer.json`: BPE, Unigram, WordPiece or WordLevel."""

    file = FILE
    own: ClassVar[JsonObject] = {}

    @panics_as(_broken)
    def __init__(self, data: bytes, files: Files, *, literal: bool) -> None:
        """Adds the tokens that `files` name. With `literal`, added tokens match by their texts, without flags. Raises
        ModelError if the file or a config is broken."""
        document = _parsed(data)
        if document.needs_repair:
            data = _repaired(data)
        self._backend = _build(data)
        size = self._backend.get_vocab_size(with_added_tokens=False)
        added = configured_tokens(files, self._backend.token_to_id, size, document.added)
        self.added = [token.literal for token in added] if literal else added
        read = frozenset() if document.needs_repair else frozenset(document.added)
        others = [token for token in self.added if token not in read]
        _add(self._backend, others)
        if self._moved():
            self._backend = _build(_with_vocabulary_ids(data, self.added))
            _add(self._backend, others)
        if moved := self._moved():
            first, count = moved[0], len(moved)
            log.warning(
                "added tokens get other ids than in the file", file=FILE, count=count, token=first.content, id=first.id
            )
        self.kind = type(self._backend.model).__name__
        self._added = {token.id: token for token in self.added}
        self._pieces = piece_decoding(self._backend, byte_fallback=document.model.byte_fallback is True)

    def _moved(self) -> list[AddedToken]:
        """Returns the added tokens whose ids in the library differ from their ids in the files."""
        return [token for token in self.added if token.content and self._backend.token_to_id(token.content) != token.id]

    @cached_property
    def size(self) -> int:
        return max([*self._backend.get_vocab().values(), *self._added], default=-1) + 1

    @property
    def pieces(self) -> Iterator[str]:
        # One by one: a single call for all pieces would hold the GIL for a tenth of a second.
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=False)):
            yield self._backend.id_to_token(token_id) or ""

    @panics_as(_failed)
    def encode(self, text: str) -> list[int]:
        # Only the batch call releases the GIL (a long prompt takes 0.3 s); `fast` omits the offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @panics_as(_failed)
    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return self._added_bytes(added)
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return b"" if piece is None else self._pieces.decode(piece)

    def _added_bytes(self, token: AddedToken) -> bytes:
        """Returns the bytes of an added token: in general its own text.

        Vocabularies that are not byte-level have ordinary pieces among the added tokens (Gemma: `▁▁`, two spaces). In
        these vocabularies, added tokens that are not special are decoded like pieces.
        """
        if token.special or self._pieces.byte_level:
            return plain_bytes(token.content)
        return self._pieces.decode(token.content)


def _build(data: bytes) -> tokenizers.Tokenizer:
    import tokenizers  # takes 10 to 30 ms; only needed for a model

    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:
        raise _broken(str(error)) from error
    backend.no_truncation()
    backend.no_padding()
    if isinstance(backend.model, tokenizers.models.BPE):
        backend.model.dropout = None  # for training only; a prompt must have the same tokens every time
    if restore_byte_level(backend):
        log.warning(
            "the vocabulary is byte-level, its normalizer and pre-tokenizer are not: using those of GPT-2", file=FILE
        )
    return backend


def _add(backend: tokenizers.Tokenizer, tokens: Iterable[AddedToken]) -> None:
    """Adds the tokens that the backend lacks, and replaces the flags of the tokens that it has."""
    from tokenizers import AddedToken as Entry

    backend.add_tokens([Entry(token.content, **{flag: getattr(token, flag) for flag in FLAGS}) for token in tokens])


class _Entry(msgspec.Struct, frozen=True):
    """An entry of `added_tokens`, with the fields of `AddedToken` in the same order."""

    id: int
    content: str
    special: bool | None = None
    single_word: bool | None = None
    lstrip: bool | None = None
    rstrip: bool | None = None
    normalized: bool | None = None


class _Model(msgspec.Struct, frozen=True):
    type: str | msgspec.UnsetType | None = msgspec.UNSET
    byte_fallback: bool | None = None


class _Document(msgspec.Struct, frozen=True):
    """The parts of `tokenizer.json` that the runner needs."""

    model: _Model
    added_tokens: list[_Entry] | None = []

    @property
    def added(self) -> list[AddedToken]:
        """The added tokens. Missing flags are False."""
        entries = map(astuple, self.added_tokens or [])
        return [AddedToken(token_id, text, *(flag is True for flag in flags)) for token_id, text, *flags in entries]

    @property
    def needs_repair(self) -> bool:
        """True if the library would refuse the file: it accepts no missing flag and no `null` as the model's type."""
        entries = self.added_tokens
        return self.model.type is None or entries is None or any(None in astuple(entry) for entry in entries)


def _parsed(data: bytes) -> _Document:
    """Parses the file. Raises ModelError for broken JSON, an unexpected shape or an unknown type of model."""
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(str(error)) from error
    kind = document.model.type
    if kind is not msgspec.UNSET and kind not in _MODELS:
        raise ModelError(f"parse tokenizer: unsupported tokenizer type: {kind}")
    return document


def _repaired(data: bytes) -> bytes:
    """Returns `tokenizer.json` without added tokens and without a model type `null`. Copies the rest unparsed."""
    whole = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    whole["added_tokens"] = msgspec.Raw(b"[]")
    model = msgspec.json.decode(whole["model"], type=dict[str, msgspec.Raw])
    if bytes(model.get("type", b"")) == b"null":
        del model["type"]
        whole["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(whole)


def _with_vocabulary_ids(data: bytes, tokens: Iterable[AddedToken]) -> bytes:
    """Returns `tokenizer.json` with `tokens` added to the model's vocabulary under their own ids.

    Hugging Face's tokenizers ignore the `id` of an added token that is not in the vocabulary: the token gets the next
    free id, which is wrong if the ids have gaps or are not in order. Ids in the vocabulary are kept.
    """
    whole = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(whole["model"], type=dict[str, msgspec.Raw])
    vocabulary = bytes(model["vocab"]).strip()
    ids = {token.content: token.id for token in tokens}
    if vocabulary.startswith(b"["):
        parts = [vocabulary, _continuation(len(msgspec.json.decode(vocabulary, type=list[msgspec.Raw])), ids)]
    else:
        parts = [msgspec.json.encode(ids), vocabulary]  # the last of equal keys wins
    inner = b",".join(part[1:-1] for part in parts if part[1:-1].strip())
    model["vocab"] = msgspec.Raw(vocabulary[:1] + inner + vocabulary[-1:])
    whole["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(whole)


def _continuation(size: int, ids: Mapping[str, int]) -> bytes:
    """Returns the entries from id `size` on for a vocabulary whose ids are positions (Unigram). Gaps are empty texts.

    The scores of these entries have no effect: ordinary text does not contain the tokens. They are 0, so that the
    vocabulary's lowest score, on which the weight of the unknown token depends, does not change.
    """
    texts = {token_id: text for text, token_id in ids.items()}
    last = max(texts)
    if last > size + _WIDEST_GAP:
        raise ModelError(
            f"parse tokenizer: {FILE}: added token {texts[last]!r} has the id {last}, want one near {size}"
        )
    return msgspec.json.encode([(texts.get(token_id, ""), 0.0) for token_id in range(size, last + 1)])
