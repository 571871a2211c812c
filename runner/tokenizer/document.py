"""`tokenizer.json` as data: the few parts that the runner itself must know, without building the vocabulary in Python.

The file reaches 30 MB, so it is read with one typed pass that skips the vocabulary and the merges.
"""

from collections.abc import Iterable, Iterator

import msgspec

from runner.errors import ModelError

FILE = "tokenizer.json"
_MODELS = frozenset({"", "BPE", "Unigram", "WordLevel", "WordPiece"})


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens`; the four matching flags are those of Hugging Face's tokenizers."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False

    @property
    def literal(self) -> bool:
        """True when the token is matched by its text alone."""
        return not (self.single_word or self.lstrip or self.rstrip or self.normalized)


class Pattern(msgspec.Struct, frozen=True):
    """What a `Replace` looks for: exactly one of the two is there."""

    string: str | None = msgspec.field(default=None, name="String")
    regex: str | None = msgspec.field(default=None, name="Regex")


class Component(msgspec.Struct, frozen=True):
    """A pre-tokenizer or decoder, or a `Sequence` of them."""

    type: str = ""
    pattern: Pattern | None = None
    content: str | None = None
    replacement: str | None = None
    decoders: list["Component"] = []
    pretokenizers: list["Component"] = []

    def flat(self) -> Iterator["Component"]:
        """This component and every one inside it."""
        yield self
        for part in (*self.decoders, *self.pretokenizers):
            yield from part.flat()


class _Model(msgspec.Struct, frozen=True):
    type: str = ""


class Document(msgspec.Struct, frozen=True):
    """The parts of `tokenizer.json` that are needed beside the file itself."""

    model: _Model = _Model()
    added_tokens: list[AddedToken] = []
    pre_tokenizer: Component | None = None
    decoder: Component | None = None


def parse_document(data: bytes) -> Document:
    """Read `tokenizer.json`.

    Raises:
        ModelError: the JSON is broken, has an unexpected shape, or names a model type that no tokenizer knows.
    """
    try:
        document = msgspec.json.decode(data, type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"parse tokenizer: {FILE}: {error}") from error
    if document.model.type not in _MODELS:
        raise ModelError(f"parse tokenizer: unsupported tokenizer type: {document.model.type}")
    return document


def with_literal_added_tokens(data: bytes) -> bytes:
    """Return `tokenizer.json` with every added token matched by its text alone, whatever its flags say.

    The rest of the file is copied as it stands, not parsed.
    """
    whole = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    entries = msgspec.json.decode(whole["added_tokens"], type=list[dict[str, object]])
    for entry in entries:
        entry.update(single_word=False, lstrip=False, rstrip=False, normalized=False)
    whole["added_tokens"] = msgspec.Raw(msgspec.json.encode(entries))
    return msgspec.json.encode(whole)


def with_vocabulary_ids(data: bytes, tokens: Iterable[AddedToken]) -> bytes:
    """Return `tokenizer.json` with `tokens` entered in the vocabulary of its (BPE or word) model under their own ids.

    Hugging Face's tokenizers ignore the `id` of an added token: one that the vocabulary lacks gets the next free
    number, which is another one as soon as the ids have a gap or are out of order. An id in the vocabulary is kept.
    """
    whole = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(whole["model"], type=dict[str, msgspec.Raw])
    entries = msgspec.json.encode({token.content: token.id for token in tokens})
    vocabulary = bytes(model["vocab"]).strip()
    empty = not vocabulary[1:-1].strip()
    model["vocab"] = msgspec.Raw(entries if empty else entries[:-1] + b"," + vocabulary[1:])
    whole["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(whole)
