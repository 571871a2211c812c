"""The grammar that an answer follows, if its request has one, and the ports to what compiled it."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from runner.sampling.filters import Mask
    from runner.sampling.sample import Choice


class Guidance(Protocol):
    """Leads one answer through its grammar: knows which tokens must come next, which may, and when it is over. After
    `take` and `restart`, `wait`. Owner: the engine thread."""

    @property
    def complete(self) -> bool:
        """True if nothing more may come."""
        ...

    @property
    def fault(self) -> str:
        """The reason why the answer cannot go on; empty if it can."""
        ...

    def wait(self, patience_s: float) -> bool:
        """Waits at most `patience_s`. Returns True once the next token may be asked for."""
        ...

    def take(self, *tokens: int) -> None:
        """Continues the answer with these tokens, which must not end it. `mask` raises if the grammar refuses one."""
        ...

    def forced(self, most: int) -> list[int]:
        """Takes at most `most` of the tokens that must come next, and returns them."""
        ...

    def mask(self) -> bytes:
        """Returns one bit per token, set for those that may come next, including those that end the answer.

        Raises:
            RequestError: the answer cannot go on: no token of the vocabulary is allowed, the last one was not allowed,
                or the grammar takes too much time or memory to follow.
        """
        ...

    def bit(self, token: int) -> bytes:
        """Returns the mask of one token."""
        ...

    def look_ahead(self, tokens: Sequence[int], patience_s: float) -> list[bytes | int]:
        """Returns a mask of the tokens that may follow each of these tokens, or the one token that must. The list ends
        before a token that may not come, that ends the answer, or whose mask is not known after `patience_s`. The
        answer stays where it is."""
        ...

    def restart(self, tokens: Sequence[int]) -> None:
        """Returns to the beginning of the answer and follows `tokens` from there."""
        ...

    def close(self) -> None:
        """Ends the answer. Later calls do nothing."""
        ...


class StateTape(Protocol):
    """Records the states of an answer as bytes, or plays recorded ones: then it calls none of the functions that it
    gets. Raises RequestError where the recorded function did. Owner: the engine thread."""

    def beginning(self, own: Callable[[], bytes | None]) -> bytes | None:
        """Returns the state at the beginning of the answer; None if there is none to begin."""
        ...

    def send(self, own: Callable[[], None]) -> None:
        """Asks for the next state."""
        ...

    def receive(self, own: Callable[[], tuple[float, bytes] | None]) -> tuple[float, bytes] | None:
        """Returns the processor time of the next state, in seconds, and the state; None until it has come."""
        ...

    def clock(self) -> float:
        """Returns the time, in seconds."""
        ...


class Grammar(Protocol):
    """A compiled format, reserved for one answer."""

    def guide(self, tape: StateTape | None = None) -> Guidance | None:
        """Returns what leads the answer, by way of the tape if there is one; None after `release`."""
        ...

    def release(self) -> None:
        """Gives the grammar back without an answer."""
        ...


_JUMP_TOKENS = 64  # forced tokens of one step; the model computes the logits of all of them


class AnswerGrammar:
    """The grammar of one answer: it is compiled, then starts, then advances along every token. Without a grammar all
    tokens may come, and nothing waits. Owner: the engine thread."""

    def __init__(self, compiling: "Future[Grammar] | None", eos: Collection[int], *, draws_all: bool) -> None:
        """`eos` end an answer and are not followed. With `draws_all` no token counts as forced: all are drawn."""
        self.guide: Guidance | None = None
        """The position of the answer; None before `start`, and without a grammar."""
        self.compiling = compiling
        self._eos = eos
        self._draws_all = draws_all

    @property
    def compiled(self) -> bool:
        """True unless the grammar is still being compiled."""
        return self.compiling is None or self.compiling.done()

    def start(self) -> bool:
        """Starts to follow the grammar, which was compiled. Returns False if there is none to follow: the format was
        refused, or the client has left. Raises RequestError if it cannot be followed."""
        if self.compiling is not None and not self.compiling.cancelled() and compile_error(self.compiling) is None:
            self.guide = self.compiling.result().guide()
        return self.guide is not None

    def follow(self, choice: "Choice") -> None:
        """Follows the next tokens; `wait` until that is done."""
        tokens = [token for token in choice.tokens if token not in self._eos]
        if self.guide is not None and tokens:
            self.guide.take(*tokens)

    def wait(self, patience_s: float) -> bool:
        """Waits at most `patience_s`. Returns True if the mask is known."""
        return self.guide is None or self.guide.wait(patience_s)

    def forced(self, most: int) -> list[int]:
        """Takes at most `most` tokens that must come next, and returns them; a step of an answer has a few dozens."""
        return self.guide.forced(min(most, _JUMP_TOKENS)) if self.guide is not None and not self._draws_all else []

    def look_ahead(self, drafts: Sequence[int], patience_s: float) -> "tuple[list[Mask], set[int]]":
        """Returns the masks after the first of these drafts, and the places of the drafts after which a token is
        forced. The masks end as those of `Guidance.look_ahead`."""
        if self.guide is None:
            return [], set()
        ahead = self.guide.look_ahead(drafts, patience_s)
        forced = set() if self._draws_all else {place for place, mask in enumerate(ahead) if isinstance(mask, int)}
        return [self.guide.bit(mask) if isinstance(mask, int) else mask for mask in ahead], forced

    def restart(self, answer: Sequence[int]) -> None:
        """Goes from the beginning of the grammar, which may be a token ahead, to the end of the answer so far."""
        if self.guide is not None:
            self.guide.restart(answer)

    @property
    def over(self) -> bool:
        """True if no token can come: the answer is complete, or cannot go on."""
        return self.guide is not None and (self.guide.complete or bool(self.guide.fault))

    @property
    def complete(self) -> bool:
        """True if the answer is complete."""
        return self.guide is not None and self.guide.complete

    @property
    def mask(self) -> "Mask | None":
        """The tokens that may come next. None if all may, or if none may, which `Generation.take` will find."""
        return None if self.guide is None or self.over else self.guide.mask()

    def close(self) -> None:
        """Ends the answer, which may not have begun. Later calls do nothing."""
        if self.guide is not None:
            self.guide.close()
        elif (found := self.compiling) and found.done() and not found.cancelled() and compile_error(found) is None:
            found.result().release()


def compile_error(compiling: "Future[Grammar] | None") -> BaseException | None:
    """Returns the error of a format that could not be compiled, which its client knows; else None."""
    if compiling is None or not compiling.done() or compiling.cancelled():
        return None
    return compiling.exception()
