"""The interface of a vocabulary, for any kind of file."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from runner.tokenizer.added_tokens import AddedToken
from runner.tokenizer.files import JsonObject


class Backend(Protocol):
    """A vocabulary and its rules for splitting text. Immutable: any thread may call any method at any time."""

    @property
    def file(self) -> str:
        """The name of its file."""
        ...

    @property
    def kind(self) -> str:
        """The kind of vocabulary, for people: `BPE`, `Unigram`, `sentencepiece BPE`, ..."""
        ...

    @property
    def added(self) -> Sequence[AddedToken]:
        """The texts that become one id wherever they occur."""
        ...

    @property
    def size(self) -> int:
        """The number of ids, including gaps left by added tokens."""
        ...

    @property
    def pieces(self) -> Iterable[str]:
        """The entries of the vocabulary as the file spells them; added tokens may be missing."""
        ...

    @property
    def own(self) -> JsonObject:
        """`bos_token` and `eos_token`, if the vocabulary itself names them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenizes `text`, which has no lone surrogates. Releases the GIL for long work."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the output; empty for an id outside the vocabulary."""
        ...
