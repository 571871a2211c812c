"""`tokenizer.json` as data: the few parts that the runner itself must know, without building the vocabulary in Python.

The file reaches 30 MB, so it is read with one typed pass that skips the vocabulary and the merges.
"""

from collections.abc import Iterable, Mapping

import msgspec

from runner.errors import ModelError
from runner.tokenizer.added_tokens import AddedToken

FILE = "tokenizer.json"
_WIDEST_GAP = 1 << 17
"""Between the vocabulary and the last added token, where each id in between takes an entry."""
_MODELS = frozenset({None, "BPE", "Unigram", "WordLevel", "WordPiece"})
_LITERAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class _Entry(msgspec.Struct, frozen=True):
    """One entry of `added_tokens`; the four matching flags are those of Hugging Face's tokenizers."""

    id: int
    content: str
    special: bool | None = None
    single_word: bool | None = None
    lstrip: bool | None = None
    rstrip: bool | None = None
    normalized: bool | None = None

    @property
    def literal(self) -> bool:
        """True when the library reads the entry, and matches the token by its text alone."""
        flags = (self.single_word, self.lstrip, self.rstrip, self.normalized)
        return self.special is not None and all(flag is False for flag in flags)


class _Model(msgspec.Struct, frozen=True):
    type: str | msgspec.UnsetType | None = msgspec.UNSET
    byte_fallback: bool | None = None


class JsonDocument(msgspec.Struct, frozen=True):
    """The parts of `tokenizer.json` that are needed beside the file itself."""

    model: _Model
    added_tokens: list[_Entry] | None = []

    @property
    def added(self) -> list[AddedToken]:
        entries = self.added_tokens or []
        return [AddedToken(entry.id, entry.content, entry.special is True) for entry in entries]

    @property
    def needs_repair(self) -> bool:
        """True for what the library refuses or reads in another way than the wire wants it."""
        return self.model.type is None or self.added_tokens is None or not all(e.literal for e in self.added_tokens)


def parse_document(data: bytes) -> JsonDocument:
    """Read `tokenizer.json`.

    Raises:
        ModelError: the JSON is broken, has an unexpected shape, or names a model type that no tokenizer knows.
    """
    try:
        document = msgspec.json.decode(data, type=JsonDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"parse tokenizer: {FILE}: {error}") from error
    kind = document.model.type
    if kind is not msgspec.UNSET and kind not in _MODELS:
        raise ModelError(f"parse tokenizer: unsupported tokenizer type: {kind}")
    return document


def repaired(data: bytes) -> bytes:
    """Return `tokenizer.json` with every added token matched by its text alone, whatever its flags say.

    Missing flags are filled in, and a `null` in the place of the tokens or of the model's type is as if it were absent.
    The rest of the file is copied as it stands, not parsed.
    """
    whole = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    entries = msgspec.json.decode(whole.get("added_tokens", b"null"), type=list[dict[str, object]] | None) or []
    entries = [{**entry, "special": entry.get("special") is True, **_LITERAL} for entry in entries]
    whole["added_tokens"] = msgspec.Raw(msgspec.json.encode(entries))
    model = msgspec.json.decode(whole["model"], type=dict[str, msgspec.Raw])
    if bytes(model.get("type", b"")) == b"null":
        del model["type"]
        whole["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(whole)


def with_vocabulary_ids(data: bytes, tokens: Iterable[AddedToken]) -> bytes:
    """Return `tokenizer.json` with `tokens` entered in the vocabulary of its model under their own ids.

    Hugging Face's tokenizers ignore the `id` of an added token: one that the vocabulary lacks gets the next free
    number, which is another one as soon as the ids have a gap or are out of order. An id in the vocabulary is kept.
    """
    whole = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(whole["model"], type=dict[str, msgspec.Raw])
    vocabulary = bytes(model["vocab"]).strip()
    ids = {token.content: token.id for token in tokens}
    if vocabulary.startswith(b"["):
        parts = [vocabulary, _continuation(len(msgspec.json.decode(vocabulary, type=list[msgspec.Raw])), ids)]
    else:
        parts = [msgspec.json.encode(ids), vocabulary]  # of two equal keys the last one counts
    inner = b",".join(part[1:-1] for part in parts if part[1:-1].strip())
    model["vocab"] = msgspec.Raw(vocabulary[:1] + inner + vocabulary[-1:])
    whole["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(whole)


def _continuation(size: int, ids: Mapping[str, int]) -> bytes:
    """The entries from `size` on of a vocabulary whose ids are positions (Unigram); a gap is an empty text.

    Scores do not matter: no ordinary text holds these, and 0 leaves the lowest one, which weighs the unknown, as it is.
    """
    texts = {token_id: text for text, token_id in ids.items()}
    last = max(texts)
    if last > size + _WIDEST_GAP:
        raise ModelError(
            f"parse tokenizer: {FILE}: added token {texts[last]!r} has the id {last}, want one near {size}"
        )
    return msgspec.json.encode([(texts.get(token_id, ""), 0.0) for token_id in range(size, last + 1)])
