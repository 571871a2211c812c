"""What a vocabulary must be able to do, whatever file it is in."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from runner.tokenizer.added_tokens import AddedToken
from runner.tokenizer.files import JsonObject


class Backend(Protocol):
    """A vocabulary and its rules for cutting text. Immutable: any thread may call any method at any time."""

    @property
    def file(self) -> str:
        """The name of the file it was read from."""
        ...

    @property
    def kind(self) -> str:
        """For a reader: `BPE`, `Unigram`, `sentencepiece BPE`, ..."""
        ...

    @property
    def added(self) -> Sequence[AddedToken]:
        """The texts that become one id wherever they stand."""
        ...

    @property
    def size(self) -> int:
        """Number of ids, gaps that added tokens leave included."""
        ...

    @property
    def pieces(self) -> Iterable[str]:
        """The entries of the vocabulary as the file spells them; added tokens may be missing."""
        ...

    @property
    def own(self) -> JsonObject:
        """`bos_token` and `eos_token`, as far as the vocabulary itself names them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenize `text`, which has no lone surrogates. Gives up the GIL for all that takes long."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the output; empty for an id outside the table."""
        ...
