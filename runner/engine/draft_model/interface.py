"""A model that drafts, as answers see it."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import mlx.core as mx

from runner.cache.session import LiveSession
from runner.sampling.sampler import Sampler

Forward: TypeAlias = Callable[[mx.array, list[object]], mx.array]
"""Maps tokens [1, L] and the layers of one text to logits [1, L, V]."""


class DraftModel(Protocol):
    """Drafts the tokens of one answer after the other. Owner: the engine thread.

    `session` is that of the answer. Its `recorded` tokens are all of the prompt and the answer so far; a model without
    a context of its own finds there what the answer's model has computed for them. Whatever a method raises ends the
    use of the model, and no answer.
    """

    name: str
    at_once: bool
    """True if it takes as long for many drafts as for one."""

    def read(self, session: LiveSession, *, briefly: bool) -> bool:
        """Reads a part of the text if the model has too little of it to draft. Returns False if it had enough.

        A part takes no longer than a short slice of a prompt. `briefly` asks for as little as a single try is worth.
        """
        ...

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        """Returns at most `most` tokens that may come next, drawn as the answer's `sampler` would draw them, which
        stays as it is. Called when `read` has returned False."""
        ...

    def free(self) -> None:
        """Frees all but the weights."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of all but the weights."""
        ...
