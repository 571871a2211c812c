"""The drafter of one answer, as the engine sees it."""

from collections.abc import Sequence
from typing import Protocol

from runner.cache.session import LiveSession
from runner.sampling.sampler import Sampler


class Drafter(Protocol):
    """Proposes tokens of one answer. Owner: the engine thread."""

    def index(self, tokens: int) -> None:
        """Indexes so many more tokens of the prompt, a microsecond each."""
        ...

    def expects(self, session: LiveSession, most: int) -> bool:
        """Returns True if a round should follow the token that is on its way, of which nothing is recorded yet."""
        ...

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> Sequence[int]:
        """Returns at most `most` tokens that may come behind the prompt and the answer so far, whose `sampler` stays as
        it is."""
        ...

    def learn(self, drafts: int, right: int) -> None:
        """Learns how many drafts of a round were right."""
        ...

    def took(self, tokens: int, rows: int, seconds: float) -> None:
        """Learns how long a step took that gave so many tokens. `rows` is the length of its forward; 0 if it had none,
        -1 if it had several."""
        ...

    def close(self) -> None:
        """Ends the answer."""
        ...
