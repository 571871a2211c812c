"""Text to ids, ids to bytes."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain

from runner.errors import ModelError
from runner.tokenizer import json_document, model_proto, utf8
from runner.tokenizer.backend import Backend
from runner.tokenizer.files import Files
from runner.tokenizer.special_ids import SpecialIds, resolve_special_ids
from runner.tokenizer.tokenizer_json import TokenizerJson
from runner.tokenizer.tokenizer_model import CONVERT, TokenizerModel

_LINE_END = "\n"
PART_CHARACTERS = 1 << 18
"""Tokenized in some tenths of a second, at the cost of some ten megabytes."""
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
    """A model's vocabulary, used by every request of the process.

    Nothing changes after construction but two caches of decoded entries, so any thread may call any method at any time.
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
        self.add_bos = special.add_bos
        self.added = frozenset(token.id for token in backend.added)
        """The texts that become one id wherever they stand in a prompt."""
        self.special = frozenset(token.id for token in backend.added if token.special)
        """The added special tokens, which chat templates set around messages."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, gaps that added tokens leave included."""
        return self._backend.size

    def encode(self, text: str) -> list[int]:
        """Tokenize a rendered prompt.

        The spelling of an added token becomes its id wherever it stands, the longest at a place; no template is
        applied; BOS comes in front iff the model asks for it, even if the text begins with one. Other threads run
        meanwhile.
        """
        ids = self._backend.encode(_without_surrogates(text))
        return [self.bos, *ids] if self.add_bos and self.bos is not None else ids

    def encode_parts(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """`encode` for the text of these pieces, of any length: its ids by parts of `PART_CHARACTERS` at most.

        The whole at once would take a hundred times its memory, and keep a thread for as long as it takes. Parts end
        behind a line where they can; an id that would span two parts comes out as others.
        """
        held, start, encode = "", 0, self.encode
        for piece in pieces:
            held, start = held[start:] + piece, 0
            while len(held) - start > PART_CHARACTERS:
                stop = _end_of_part(held, start)
                yield encode(held[start:stop])
                start, encode = stop, self._encode_later
        yield encode(held[start:])

    def _encode_later(self, text: str) -> list[int]:
        """The ids of a text that goes on: without those that mark where one begins."""
        text = _without_surrogates(text)
        if self._is_divisible:
            return self._backend.encode(text)
        before, both = self._backend.encode(_LINE_END), self._backend.encode(_LINE_END + text)
        return both[len(before) :] if both[: len(before)] == before else self._backend.encode(text)

    @cached_property
    def _is_divisible(self) -> bool:
        """Whether the ids of a text are those of its lines."""
        lines = ("one line\n", "and another")
        return self._backend.encode("".join(lines)) == [token for line in lines for token in self._backend.encode(line)]

    @cached_property
    def longest_bytes(self) -> int:
        """How many bytes of text a token stands for at most, or some more. Looks through the whole vocabulary."""
        added = (token.content for token in self._backend.added)
        return max((len(piece.encode(errors="replace")) for piece in chain(self._backend.pieces, added)), default=0)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the output, often part of a character; empty for an id outside the table."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._backend.token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """The token decoded alone, one U+FFFD for each byte of an incomplete character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = utf8.decode(self.token_bytes(token_id))
        return text


def open_tokenizer(files: Files, *, merge_eos: bool = False) -> Tokenizer:
    """Open the model's `tokenizer.json`, or else its `tokenizer.model`, with BOS and EOS from the configs beside it.

    `merge_eos` is for a directory, see `resolve_special_ids`; without it the rules are those of Ollama's store.

    Raises:
        ModelError: no such file is there, or one of the files is broken; the text names it.
    """
    backend = _open_backend(files, is_directory=merge_eos)
    added = {token.content: token.id for token in backend.added}
    return Tokenizer(backend, resolve_special_ids(files, added, own=backend.own, merge_eos=merge_eos))


def _open_backend(files: Files, *, is_directory: bool) -> Backend:
    data = files(json_document.FILE)
    if data is not None:
        return TokenizerJson(data)
    data = files(model_proto.FILE)
    if data is not None:
        return TokenizerModel(data, files)
    if not is_directory:
        raise ModelError(f'load tokenizer config: config "{json_document.FILE}" not found in manifest')
    found = next((form for form in _OTHER_FORMS if all(files(name) is not None for name in form)), None)
    advice = f"; there is {' and '.join(found)}: {CONVERT}" if found else ""
    raise ModelError(
        f"load tokenizer config: no {json_document.FILE} and no {model_proto.FILE} in the directory{advice}"
    )


def _end_of_part(text: str, start: int) -> int:
    """Where the part that begins at `start` ends: behind a line break that no more space follows, if there is one."""
    end = start + PART_CHARACTERS
    at = text.rfind("\n", start, end)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", start, at)
    return at + 1 if at >= 0 else end


def _without_surrogates(text: str) -> str:
    """A pair of surrogates is one character; a lone one, which has no UTF-8, becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
