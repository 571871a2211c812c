"""The grammar that one answer follows, and the ports to the wing that compiles grammars."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from runner.sampling.filters import Mask
    from runner.sampling.sample import Choice


class Guidance(Protocol):
    """Leads one answer through its grammar. A guide knows which tokens must come next, which may come next, and when
    the answer is complete. After `take` or `restart`, call `wait` before asking. Owner: the engine thread."""

    @property
    def complete(self) -> bool:
        """True if no token may follow: the answer is complete."""
        ...

    @property
    def fault(self) -> str:
        """The reason why the answer cannot go on. Empty if the answer can go on."""
        ...

    def wait(self, patience_s: float) -> bool:
        """Waits at most `patience_s` seconds. Returns True if the grammar has followed all tokens."""
        ...

    def take(self, *tokens: int) -> None:
        """Continues the answer with `tokens`, none of which ends it. If the grammar refuses one, the next `mask`
        raises."""
        ...

    def forced(self, most: int) -> list[int]:
        """Continues the answer with the tokens that must come next, `most` at most. Returns these tokens."""
        ...

    def mask(self) -> bytes:
        """Returns one bit for each token of the vocabulary, set if the token may come next or may end the answer.

        Raises:
            RequestError: the answer cannot go on: no token is allowed, the last token was not allowed,
                or the grammar takes too much time or memory.
        """
        ...

    def bit(self, token: int) -> bytes:
        """Returns the mask in which only the bit of `token` is set."""
        ...

    def look_ahead(self, tokens: Sequence[int], patience_s: float) -> list[bytes | int]:
        """Returns an entry for each of `tokens`: the mask of the tokens that may follow it, or the one token that must
        follow it. The list ends before a token that is not allowed, that ends the answer, or whose mask is not known
        after `patience_s` seconds. The answer itself does not advance."""
        ...

    def restart(self, tokens: Sequence[int]) -> None:
        """Returns to the beginning of the answer, and follows `tokens` from the beginning."""
        ...

    def close(self) -> None:
        """Frees the guide's state. Later calls of `close` do nothing."""
        ...


class StateTape(Protocol):
    """Records the states of a grammar along one answer, as bytes, or plays back recorded states. A playback calls none
    of the functions `own`, and raises RequestError where the recorded function raised it. Owner: the engine thread."""

    def beginning(self, own: Callable[[], bytes | None]) -> bytes | None:
        """Returns the state at the beginning of the answer. None means that there is no grammar to follow."""
        ...

    def send(self, own: Callable[[], None]) -> None:
        """Asks for the next state, by `own`."""
        ...

    def receive(self, own: Callable[[], tuple[float, bytes] | None]) -> tuple[float, bytes] | None:
        """Returns the processor time of the next state, in seconds, and the state. None until the state has arrived."""
        ...

    def clock(self) -> float:
        """Returns the time, in seconds, by which a guide finds that a state is late."""
        ...


class Grammar(Protocol):
    """A compiled grammar, reserved for one answer."""

    def guide(self, tape: StateTape | None = None) -> Guidance | None:
        """Returns the guide of the answer; its states go through `tape` if given. None after `release`."""
        ...

    def release(self) -> None:
        """Frees a grammar that no answer will follow."""
        ...


_JUMP_TOKENS = 64  # the most forced tokens of one step: the model computes logits for each


class AnswerGrammar:
    """The grammar of one answer. A grammar is compiled, then started, and then follows each token of the answer.
    Without a grammar all tokens are allowed, and no call waits. Owner: the engine thread."""

    def __init__(self, compiling: "Future[Grammar] | None", eos: Collection[int], *, draws_all: bool) -> None:
        """The tokens `eos` end an answer; the grammar does not follow them. With `draws_all`, no token counts as
        forced: the sampler draws each token."""
        self.guide: Guidance | None = None
        """The guide of the answer. None before `start`, and without a grammar."""
        self.compiling = compiling
        self._eos = eos
        self._draws_all = draws_all

    @property
    def compiled(self) -> bool:
        """True unless the grammar is still being compiled. Also True without a grammar."""
        return self.compiling is None or self.compiling.done()

    def start(self) -> bool:
        """Starts to follow the grammar, which must be `compiled`. Returns False if no grammar can be followed: the
        format was refused, or the client has left. Raises RequestError if the compiled grammar cannot begin."""
        if self.compiling is not None and not self.compiling.cancelled() and compile_error(self.compiling) is None:
            self.guide = self.compiling.result().guide()
        return self.guide is not None

    def follow(self, choice: "Choice") -> None:
        """Makes the grammar follow the tokens of `choice`. Call `wait` before the next question to the grammar."""
        tokens = [token for token in choice.tokens if token not in self._eos]
        if self.guide is not None and tokens:
            self.guide.take(*tokens)

    def wait(self, patience_s: float) -> bool:
        """Waits at most `patience_s` seconds. Returns True if `mask` is known."""
        return self.guide is None or self.guide.wait(patience_s)

    def forced(self, most: int) -> list[int]:
        """Continues the answer with at most `most` tokens that must come next, and at most 64. Returns these tokens."""
        return self.guide.forced(min(most, _JUMP_TOKENS)) if self.guide is not None and not self._draws_all else []

    def look_ahead(self, drafts: Sequence[int], patience_s: float) -> "tuple[list[Mask], set[int]]":
        """Returns the masks after the first of `drafts`, and the places of the drafts after which a token is forced.
        The list of masks ends where the list of `Guidance.look_ahead` ends."""
        if self.guide is None:
            return [], set()
        ahead = self.guide.look_ahead(drafts, patience_s)
        forced = set() if self._draws_all else {place for place, mask in enumerate(ahead) if isinstance(mask, int)}
        return [self.guide.bit(mask) if isinstance(mask, int) else mask for mask in ahead], forced

    def restart(self, answer: Sequence[int]) -> None:
        """Restarts the grammar, which may be one token ahead, and follows `answer`, the tokens so far."""
        if self.guide is not None:
            self.guide.restart(answer)

    @property
    def over(self) -> bool:
        """True if no token can follow: the answer is complete, or the answer cannot go on."""
        return self.guide is not None and (self.guide.complete or bool(self.guide.fault))

    @property
    def complete(self) -> bool:
        """True if the answer is complete."""
        return self.guide is not None and self.guide.complete

    @property
    def mask(self) -> "Mask | None":
        """The mask of the tokens that may come next. None if all tokens may come next, or if none may;
        `Generation.take` then ends the answer."""
        return None if self.guide is None or self.over else self.guide.mask()

    def close(self) -> None:
        """Frees the grammar, whether the answer has begun or not. Later calls do nothing."""
        if self.guide is not None:
            self.guide.close()
        elif (found := self.compiling) and found.done() and not found.cancelled() and compile_error(found) is None:
            found.result().release()


def compile_error(compiling: "Future[Grammar] | None") -> BaseException | None:
    """Returns the error if the format could not be compiled, which the client has been told; else None."""
    if compiling is None or not compiling.done() or compiling.cancelled():
        return None
    return compiling.exception()
