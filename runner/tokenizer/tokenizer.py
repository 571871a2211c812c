"""Encodes text to ids and decodes ids to bytes, for all kinds of vocabularies."""

import codecs
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple, Protocol

from runner.errors import ModelError
from runner.tokenizer import tokenizer_json, tokenizer_model
from runner.tokenizer.added_tokens import AddedToken, special_config, without_broken
from runner.tokenizer.model_files import Files, JsonObject, read_object, token_text
from runner.tokenizer.tokenizer_json import TokenizerJson
from runner.tokenizer.tokenizer_model import CONVERT, TokenizerModel

# --- The interface of a vocabulary, for any kind of file.


class Backend(Protocol):
    """A vocabulary and its rules for splitting text. Immutable: any thread may call any method at any time."""

    @property
    def file(self) -> str:
        """The name of its file."""

    @property
    def kind(self) -> str:
        """The kind of vocabulary, for people: `BPE`, `Unigram`, `sentencepiece BPE`, ..."""

    @property
    def added(self) -> Sequence[AddedToken]:
        """The texts that become one id wherever they occur."""

    @property
    def size(self) -> int:
        """The number of ids, including gaps left by added tokens."""

    @property
    def pieces(self) -> Iterable[str]:
        """The entries of the vocabulary as the file spells them; added tokens may be missing."""

    @property
    def own(self) -> JsonObject:
        """`bos_token` and `eos_token`, if the vocabulary itself names them."""

    def encode(self, text: str) -> list[int]:
        """Tokenizes `text`, which has no lone surrogates. Releases the GIL for long work."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the output; empty for an id outside the vocabulary."""


# --- Finds the ids that begin and end a text; of several files, the first that names one wins. See
# docs/internals/wire.md, 2.8.

_NOTHING: JsonObject = {}


class SpecialIds(NamedTuple):
    """The ids that begin and end a text. `add_bos` is true if prompts must begin with BOS."""

    bos: int | None
    eos: frozenset[int]
    add_bos: bool
    end: int | None = None
    """The first of `eos`, as the files list them."""


def resolve_special_ids(
    files: Files, added: Mapping[str, int], *, own: JsonObject = _NOTHING, merge_eos: bool = False
) -> SpecialIds:
    """Finds BOS and EOS; `added` maps the text of every added token to its id.

    Ids come from `generation_config.json`, else `config.json` (top level), else from the token texts in
    `tokenizer_config.json`, else from those in `own`, which the vocabulary itself names. BOS and EOS are looked up
    separately, and lists are never merged. A negative id means none. If none of them names one, the text in
    `special_tokens_map.json` counts, then the ids in the `text_config` of `config.json`.

    With `merge_eos`, the token text ends an answer in addition to the ids, as in mlx-lm, and `text_config` counts right
    after `config.json`, as in transformers.

    Raises ModelError if one of the files is not a JSON object.
    """
    generation, model = read_object(files, "generation_config.json"), read_object(files, "config.json")
    config, older = read_object(files, "tokenizer_config.json"), read_object(files, "special_tokens_map.json")
    nested = model.get("text_config")
    text_config = nested if isinstance(nested, dict) else _NOTHING
    numbered = [generation, model, text_config] if merge_eos else [generation, model]
    named = [special_config(config, older), older, own] if merge_eos else [config, own, older]
    bos = _first_ids(numbered, "bos_token_id") or _first_named(named, "bos_token", added)
    eos, ends = _first_ids(numbered, "eos_token_id"), _first_named(named, "eos_token", added)
    if not eos and not ends:
        ends = _first_ids([text_config], "eos_token_id")
    return SpecialIds(
        bos=bos[0] if bos else None,
        eos=frozenset([*eos, *ends] if merge_eos else eos or ends),
        add_bos=bool(bos) and config.get("add_bos_token") is True,
        end=next(iter((*eos, *ends)), None),
    )


def _first_ids(sources: list[JsonObject], key: str) -> list[int]:
    return next((ids for source in sources if (ids := _ids(source.get(key)))), [])


def _ids(value: object) -> list[int]:
    """Returns the ids in an integer or a list of integers; everything else counts as absent."""
    values = value if isinstance(value, list) else [value]
    numbers = [v for v in values if (type(v) is float and v.is_integer()) or type(v) is int]
    return [int(number) for number in numbers if number >= 0]


def _first_named(sources: list[JsonObject], key: str, added: Mapping[str, int]) -> list[int]:
    """Returns the id of the first token text that is an added token."""
    texts = (token_text(source.get(key)) for source in sources)
    return next(([added[text]] for text in texts if text is not None and text in added), [])


_LINE_END = "\n"
PART_CHARACTERS = 1 << 18
"""The length of a part in `encode_parts`: some tenths of a second, and about ten megabytes."""
_PART_IDS = 4096
"""The ids in a part of `decode_parts`: a few milliseconds."""
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
    """A model's tokenizer, shared by all requests.

    Any thread may call any method at any time: only two caches of decoded entries change after construction.
    """

    def __init__(self, backend: Backend, special: SpecialIds) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.file = backend.file
        self.kind = backend.kind
        """`BPE`, `Unigram`, `WordPiece`, `WordLevel`, `sentencepiece BPE`, `sentencepiece unigram`."""
        self.bos = special.bos
        self.eos = special.eos
        self.end = special.end
        """The one of them that ends a text which is embedded."""
        self.add_bos = special.add_bos
        self.added = frozenset(token.id for token in backend.added)
        """Ids of the texts that become one id wherever they occur in a prompt."""
        self.special = frozenset(token.id for token in backend.added if token.special)
        """Ids of the added special tokens, which chat templates set around messages."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, including gaps left by added tokens."""
        return self._backend.size

    def encode(self, text: str) -> list[int]:
        """Tokenizes a rendered prompt.

        The spelling of an added token becomes its id wherever it occurs, the longest one at each position. No template
        is applied. BOS is put in front iff the model asks for it, even if the text begins with one. Long texts are
        encoded without the GIL.
        """
        ids = self.encode_without_bos(text)
        return [self.bos, *ids] if self.add_bos and self.bos is not None else ids

    def encode_without_bos(self, text: str) -> list[int]:
        """Tokenizes a text by itself that follows others in a prompt; otherwise as `encode`."""
        return self._backend.encode(_without_surrogates(text))

    def encode_parts(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Encodes a text of any length, given in pieces. Yields the ids of parts of at most `PART_CHARACTERS`.

        Encoding it at once would take a hundred times its memory, and block a thread all the time. Parts end after a
        line where possible; a token that would span two parts is replaced by others.
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
        """Returns the tokens of a text without BOS; of a long one only some once there are more than `most`. Yields
        after each part of a long text, so that others may have a turn."""
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
        """Encodes the continuation of a text, without the ids that mark the beginning of one."""
        text = _without_surrogates(text)
        if self._is_divisible:
            return self._backend.encode(text)
        before, both = self._backend.encode(_LINE_END), self._backend.encode(_LINE_END + text)
        return both[len(before) :] if both[: len(before)] == before else self._backend.encode(text)

    @cached_property
    def _is_divisible(self) -> bool:
        """True if the ids of a text are those of its lines in turn."""
        lines = ("one line\n", "and another")
        return self._backend.encode("".join(lines)) == [token for line in lines for token in self._backend.encode(line)]

    def decode_parts(self, ids: Sequence[int]) -> Iterator[str]:
        """Yields the text of tokens, a part at a time: special tokens as they are spelled, unknown ids as nothing, and
        U+FFFD for each byte that is not UTF-8."""
        text, size = codecs.getincrementaldecoder("utf-8")(_ONE_PER_BYTE), self.vocab_size
        for start in range(0, len(ids), _PART_IDS):
            part = ids[start : start + _PART_IDS]
            yield text.decode(b"".join(self.token_bytes(each) for each in part if 0 <= each < size))
        yield text.decode(b"", final=True)

    @cached_property
    def longest_bytes(self) -> int:
        """An upper bound on the bytes of text in a token. Looks through the whole vocabulary."""
        added = (token.content for token in self._backend.added)
        return max((len(piece.encode(errors="replace")) for piece in chain(self._backend.pieces, added)), default=0)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the output, often part of a character; empty for an unknown id."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._backend.token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """Returns the text of the token by itself, with one U+FFFD for each byte of an incomplete character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = decode_utf8(self.token_bytes(token_id))
        return text


def open_tokenizer(files: Files, *, merge_eos: bool = False) -> Tokenizer:
    """Opens the model's `tokenizer.json`, or else its `tokenizer.model`, with BOS and EOS from the configs beside it.

    `merge_eos` is for a directory, see `resolve_special_ids`; without it, the rules of Ollama's store apply.

    Raises ModelError if there is no such file, or one of the files is broken; the message names it.
    """
    files = without_broken(files, is_directory=merge_eos)
    backend = _open_backend(files, is_directory=merge_eos)
    added = {token.content: token.id for token in backend.added}
    return Tokenizer(backend, resolve_special_ids(files, added, own=backend.own, merge_eos=merge_eos))


def _open_backend(files: Files, *, is_directory: bool) -> Backend:
    data = files(tokenizer_json.FILE)
    if data is not None:
        return TokenizerJson(data, files, literal=not is_directory)
    data = files(tokenizer_model.FILE)
    if data is not None:
        return TokenizerModel(data, files, literal=not is_directory)
    if not is_directory:
        raise ModelError(f'load tokenizer config: config "{tokenizer_json.FILE}" not found in manifest')
    found = next((form for form in _OTHER_FORMS if all(files(name) is not None for name in form)), None)
    advice = f"; there is {' and '.join(found)}: {CONVERT}" if found else ""
    raise ModelError(
        f"load tokenizer config: no {tokenizer_json.FILE} and no {tokenizer_model.FILE} in the directory{advice}"
    )


def _end_of_part(text: str, start: int) -> int:
    """Returns the end of the part at `start`: after a line break without white space after it, if there is one."""
    end = start + PART_CHARACTERS
    at = text.rfind("\n", start, end)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", start, at)
    return at + 1 if at >= 0 else end


def _without_surrogates(text: str) -> str:
    """Joins pairs of surrogates to characters; replaces lone ones, which have no UTF-8, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --- Decodes UTF-8 by the rules of a Go host (docs/internals/wire.md, 5).

_ONE_PER_BYTE: Final = "runner-one-replacement-per-byte"
_ZERO_WIDTH_JOINER: Final = "\u200d"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replaces every byte of an invalid sequence by U+FFFD, as Go does; Python's own "replace" merges them into one."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_ONE_PER_BYTE, _replace_each_byte)


def decode_utf8(data: bytes) -> str:
    """Decodes `data` by itself, with one U+FFFD for every byte outside of complete, valid sequences."""
    return data.decode("utf-8", _ONE_PER_BYTE)


class Utf8Stream:
    """The incremental decoder of one generation, which owns it. Holds at most three bytes."""

    def __init__(self) -> None:
        self._pending = b""
        self._last = ""

    def feed(self, data: bytes) -> str:
        """Adds `data`; returns the text of all held bytes up to an incomplete sequence at the end.

        A byte that can never become valid becomes U+FFFD at once, one for each byte. An incomplete sequence that may
        still become valid is held back.
        """
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, _ONE_PER_BYTE, False)
        self._pending = data[used:]
        if self._pending[:1] == b"\xed" and self._pending[1:] >= b"\xa0":
            # Python rejects a surrogate at its third byte, Go at its second.
            text += "\ufffd" * len(self._pending)
            self._pending = b""
        if text:
            self._last = text[-1]
        return text

    def finish(self) -> str:
        """Ends the stream. Returns the text for the held bytes: `""` or one U+FFFD.

        Ollama's own runner drops the incomplete character, and so do we: nothing of it is on the screen yet. The
        exception is a tail after a zero width joiner. There the reader already sees the beginning of a joined character
        (a family, a flag), so one U+FFFD, for what would have been one character, shows that it is incomplete.
        """
        broken, self._pending = self._pending, b""
        return "\ufffd" if broken and self._last == _ZERO_WIDTH_JOINER else ""
