"""Reads the few parts of `tokenizer.json` that the runner itself needs, and repairs files that the library misreads.

The file may have 30 MB. One typed pass skips the vocabulary and the merges.
"""

from collections.abc import Iterable, Mapping

import msgspec

from runner.errors import ModelError
from runner.tokenizer.added_tokens import AddedToken

FILE = "tokenizer.json"
_WIDEST_GAP = 1 << 17
"""Limit on the ids between the vocabulary and the last added token, which each need an entry."""
_MODELS = frozenset({None, "BPE", "Unigram", "WordLevel", "WordPiece"})
_LITERAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class _Entry(msgspec.Struct, frozen=True):
    """An entry of `added_tokens`, with the four matching flags of Hugging Face's tokenizers."""

    id: int
    content: str
    special: bool | None = None
    single_word: bool | None = None
    lstrip: bool | None = None
    rstrip: bool | None = None
    normalized: bool | None = None

    @property
    def literal(self) -> bool:
        """True if the library accepts the entry and matches the token by its text alone."""
        flags = (self.single_word, self.lstrip, self.rstrip, self.normalized)
        return self.special is not None and all(flag is False for flag in flags)


class _Model(msgspec.Struct, frozen=True):
    type: str | msgspec.UnsetType | None = msgspec.UNSET
    byte_fallback: bool | None = None


class JsonDocument(msgspec.Struct, frozen=True):
    """The parts of `tokenizer.json` that the runner needs."""

    model: _Model
    added_tokens: list[_Entry] | None = []

    @property
    def added(self) -> list[AddedToken]:
        entries = self.added_tokens or []
        return [AddedToken(entry.id, entry.content, entry.special is True) for entry in entries]

    @property
    def needs_repair(self) -> bool:
        """True if the library would refuse the file, or match added tokens differently from Ollama."""
        return self.model.type is None or self.added_tokens is None or not all(e.literal for e in self.added_tokens)


def parse_document(data: bytes) -> JsonDocument:
    """Parses `tokenizer.json`.

    Raises:
        ModelError: the JSON is broken, has an unexpected shape, or names an unknown model type.
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
    """Returns `tokenizer.json` with every added token matched by its text alone, regardless of its flags.

    Fills in missing flags; removes `null` in place of the tokens or the model type. The rest is copied without parsing.
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
    """Returns `tokenizer.json` with `tokens` added to the model's vocabulary under their own ids.

    Hugging Face's tokenizers ignore the `id` of an added token that is not in the vocabulary: it gets the next free id,
    which differs if the ids have gaps or are out of order. Ids in the vocabulary are kept.
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
    """Returns the entries from `size` on for a vocabulary whose ids are positions (Unigram); gaps are empty texts.

    The scores do not matter, since ordinary text does not contain these tokens. A score of 0 keeps the lowest score, on
    which the weight of the unknown token depends.
    """
    texts = {token_id: text for text, token_id in ids.items()}
    last = max(texts)
    if last > size + _WIDEST_GAP:
        raise ModelError(
            f"parse tokenizer: {FILE}: added token {texts[last]!r} has the id {last}, want one near {size}"
        )
    return msgspec.json.encode([(texts.get(token_id, ""), 0.0) for token_id in range(size, last + 1)])
