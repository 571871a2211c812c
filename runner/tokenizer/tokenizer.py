"""Encodes text to ids and decodes ids to bytes, for all kinds of vocabularies."""

import codecs
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Protocol

from runner.errors import ModelError
from runner.tokenizer.added_tokens import AddedToken, without_broken
from runner.tokenizer.detokenizer import ONE_PER_BYTE, decode_utf8
from runner.tokenizer.model_files import Files, JsonObject
from runner.tokenizer.special_ids import SpecialIds, resolve_special_ids
from runner.tokenizer.tokenizer_json import TokenizerJson
from runner.tokenizer.tokenizer_model import CONVERT, TokenizerModel


class Backend(Protocol):
    """A vocabulary and the rules for splitting text. Immutable: any thread may call any method at any time."""

    @property
    def file(self) -> str:
        """The name of the vocabulary's file."""

    @property
    def kind(self) -> str:
        """The kind of vocabulary, for messages: `BPE`, `Unigram`, `WordPiece`, `WordLevel`, `sentencepiece BPE` or
        `sentencepiece unigram`."""

    @property
    def added(self) -> Sequence[AddedToken]:
        """The added tokens: texts that become one id wherever they occur."""

    @property
    def size(self) -> int:
        """The number of ids, including gaps left by added tokens."""

    @property
    def pieces(self) -> Iterable[str]:
        """The entries of the vocabulary as the file spells them; added tokens may be missing."""

    @property
    def own(self) -> JsonObject:
        """The texts `bos_token` and `eos_token`, if the vocabulary itself names them."""

    def encode(self, text: str) -> list[int]:
        """Tokenizes `text`, which must not have surrogates. Releases the GIL."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the output; no bytes for an id outside the vocabulary."""


PART_CHARACTERS = 1 << 18
"""The most characters of a part in `encode_parts`. A part needs some tenths of a second, and about ten megabytes."""
_PART_IDS = 4096
"""The number of ids in a part of `decode_parts`. A part needs a few milliseconds."""
_OTHER_FORMS = (
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("qwen.tiktoken",),
    ("tokenizer.tiktoken",),
    ("tiktoken.model",),
    ("tekken.json",),
)


class Tokenizer:
    """A model's tokenizer, shared by all requests. Any thread may call any method at any time: after construction only
    caches of computed values change."""

    def __init__(self, backend: Backend, special: SpecialIds) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.file = backend.file
        self.kind = backend.kind
        self.bos = special.bos
        self.eos = special.eos
        self.end = special.end
        """The end token of a text to embed, or None."""
        self.add_bos = special.add_bos
        self.added = frozenset(token.id for token in backend.added)
        """The ids of the added tokens, whose texts become one id wherever they occur in a prompt."""
        self.special = frozenset(token.id for token in backend.added if token.special)
        """The ids of the special added tokens, which chat templates put around messages."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, including gaps left by added tokens."""
        return self._backend.size

    def encode(self, text: str) -> list[int]:
        """Tokenizes a rendered prompt.

        The text of an added token becomes the id of the token wherever it occurs; at each position the longest text
        counts. No template is applied. BOS comes first if the model asks for it, even if the text itself begins with
        BOS. Long texts are encoded without the GIL.
        """
        ids = self.encode_without_bos(text)
        return [self.bos, *ids] if self.add_bos and self.bos is not None else ids

    def encode_without_bos(self, text: str) -> list[int]:
        """Tokenizes a text as `encode` does, but without BOS: for a text that follows other texts in a prompt."""
        return self._backend.encode(_without_surrogates(text))

    def encode_parts(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Encodes a text of any length, given in pieces. Yields the ids of parts of at most `PART_CHARACTERS`.

        Encoding the whole text in one call would need a hundred times the memory of the text, and block a thread until
        the end. Parts end after a line if possible. A token that would span two parts is replaced by other tokens.
        """
        held, start, encode = "", 0, self.encode
        for piece in pieces:
            held, start = held[start:] + piece, 0
            while len(held) - start > PART_CHARACTERS:
                stop = _end_of_part(held, start)
                yield encode(held[start:stop])
                start, encode = stop, self._encode_later
        yield encode(held[start:])

    def encode_within(self, text: str, most: int) -> Generator[None, None, list[int]]:
        """Returns the tokens of a text without BOS. Stops encoding a long text once it has more than `most` tokens.
        Yields after each part of a long text, so that the caller can do other work."""
        if len(text) <= PART_CHARACTERS:
            return self.encode_without_bos(text)
        tokens: list[int] = []
        for part in self.encode_parts([text]):
            tokens += part
            if len(tokens) > most + self.add_bos:
                break
            yield
        return tokens[self.add_bos :]

    def _encode_later(self, text: str) -> list[int]:
        """Encodes the continuation of a text, without the ids that a text has only at its beginning."""
        text = _without_surrogates(text)
        if self._is_divisible:
            return self._backend.encode(text)
        before, both = self._backend.encode("\n"), self._backend.encode(f"\n{text}")
        return both[len(before) :] if both[: len(before)] == before else self._backend.encode(text)

    @cached_property
    def _is_divisible(self) -> bool:
        """True if the ids of two lines are the ids of the first line and then the ids of the second line."""
        lines = ("one line\n", "and another")
        return self._backend.encode("".join(lines)) == [token for line in lines for token in self._backend.encode(line)]

    def decode_parts(self, ids: Sequence[int]) -> Iterator[str]:
        """Yields the text of tokens, a part at a time. Special tokens have their own texts, unknown ids have none, and
        each byte that is not UTF-8 becomes U+FFFD."""
        text, size = codecs.getincrementaldecoder("utf-8")(ONE_PER_BYTE), self.vocab_size
        for start in range(0, len(ids), _PART_IDS):
            part = ids[start : start + _PART_IDS]
            yield text.decode(b"".join(self.token_bytes(each) for each in part if 0 <= each < size))
        yield text.decode(b"", final=True)

    @cached_property
    def longest_bytes(self) -> int:
        """The most bytes of text that a token can have, or more. Reads the whole vocabulary."""
        added = (token.content for token in self._backend.added)
        return max((len(piece.encode(errors="replace")) for piece in chain(self._backend.pieces, added)), default=0)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the output, often part of a character; none for an unknown id."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._backend.token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """Returns the text of the token alone, with one U+FFFD for each byte of an incomplete character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = decode_utf8(self.token_bytes(token_id))
        return text


def open_tokenizer(files: Files, *, merge_eos: bool = False) -> Tokenizer:
    """Opens the model's `tokenizer.json`, or else its `tokenizer.model`. BOS and EOS come from the configs beside it.

    `merge_eos` is for a model in a directory (see `resolve_special_ids`). Otherwise Ollama's rules apply.

    Raises ModelError if neither file exists, or if a file is broken. The message names the file.
    """
    files = without_broken(files, is_directory=merge_eos)
    backend = _open_backend(files, is_directory=merge_eos)
    added = {token.content: token.id for token in backend.added}
    return Tokenizer(backend, resolve_special_ids(files, added, own=backend.own, merge_eos=merge_eos))


def _open_backend(files: Files, *, is_directory: bool) -> Backend:
    for backend in (TokenizerJson, TokenizerModel):
        if (data := files(backend.file)) is not None:
            return backend(data, files, literal=not is_directory)
    if not is_directory:
        raise ModelError(f'load tokenizer config: config "{TokenizerJson.file}" not found in manifest')
    found = next((form for form in _OTHER_FORMS if all(files(name) is not None for name in form)), None)
    advice = f"; there is {' and '.join(found)}: {CONVERT}" if found else ""
    raise ModelError(
        f"load tokenizer config: no {TokenizerJson.file} and no {TokenizerModel.file} in the directory{advice}"
    )


def _end_of_part(text: str, start: int) -> int:
    """Returns the end of the part that begins at `start`: after its last line break without white space after it, if
    any."""
    end = start + PART_CHARACTERS
    at = text.rfind("\n", start, end)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", start, at)
    return at + 1 if at >= 0 else end


def _without_surrogates(text: str) -> str:
    """Joins pairs of surrogates to characters. Replaces lone surrogates, which have no UTF-8, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
