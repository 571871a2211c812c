"""The position of an answer in its grammar, as the engine sees it."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import msgspec

from runner.errors import RequestError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from runner.sampling.filters import Mask
    from runner.sampling.sample import Choice

_STEP_S = 0.05
_SAVED_S = 5.0
_LATE_S = 1.0  # allowance for other processes that use the processor


class Follow(msgspec.Struct, frozen=True):
    """Tokens with which the answer continues; answered with a `State`."""

    tokens: list[int]
    restart: bool = False
    """True if `tokens` follow the beginning of the answer, not its current position."""
    tries: bool = False
    """True if the answer stays at its current position: the state says what may come after `tokens`."""


class State(msgspec.Struct, frozen=True):
    """The position of an answer in its grammar."""

    forced: list[int] = []
    """Tokens about which the grammar leaves no choice. All other fields describe the position after them."""
    mask: bytes = b""
    """One bit per token, set for those that may come next, including those that end the answer; empty if complete."""
    complete: bool = False
    """True if nothing more may come."""
    error: str = ""
    """The reason why the answer cannot go on, or why there is no grammar."""
    left_out: str = ""
    """The fault of the parts of schemas that cannot be enforced and were left out, at the beginning of an answer; empty
    if all are enforced."""
    tried: list[bytes | int] | None = None
    """What may come after each of the tokens that were tried, as far as they may come and others after them: a mask,
    or the one token. All fields above are empty then; None if nothing was tried."""
    seconds: float = 0.0
    """Processor time of this step."""
    nbytes: int = 0
    """Memory that the worker has allocated so far."""


class StateSource(Protocol):
    """Computes the states of one answer, usually in another process. One step is in flight at a time."""

    def send(self, step: Follow) -> None:
        """Starts to compute the state after this step. Raises RequestError if that is impossible."""
        ...

    def receive(self, patience_s: float) -> State | None:
        """Returns that state, or None if it takes longer than `patience_s`. Raises RequestError if it cannot come."""
        ...

    def close(self) -> None:
        """Ends the answer."""
        ...


class Grammar(Protocol):
    """A compiled format, reserved for one answer."""

    def guide(self) -> "Guide | None":
        """Returns the guide of the answer; None after `release`."""
        ...

    def release(self) -> None:
        """Gives the grammar back without an answer."""
        ...


class Guide:
    """Follows one answer through its grammar: the tokens that must come next, those that may, and whether it is over.

    The time that a mask takes depends on the grammar, so a source computes the states, usually in another process:
    after `take` and `restart`, `wait` for the next one. An answer may use 50 ms of processor time for each token; it
    saves what it does not use, up to 5 s, for later tokens. Owner: the engine thread.
    """

    def __init__(self, source: StateSource, state: State, size: int, clock: Callable[[], float] = monotonic) -> None:
        """Starts at `state`, the beginning of the answer, over a vocabulary of `size` tokens. `clock` is in seconds."""
        self.source = source
        """Computes the states after the first one."""
        self._clock = clock
        self.size = size
        """The number of tokens in the vocabulary."""
        self._awaited = 0  # states in flight; only the last one counts
        self._since_s = 0.0  # when the last state was requested
        self._spare_s = _SAVED_S
        self._granted_s = 0.0  # for the tokens in flight
        self._tried: list[bytes | int] = []  # what came of the latest look ahead
        self._closed = False
        self._enter(state)

    def wait(self, patience_s: float) -> bool:
        """Waits at most `patience_s` for the next state. Returns True once the next token may be asked for."""
        while self._awaited:
            try:
                state = self.source.receive(patience_s)
            except RequestError as error:
                self._fail(str(error))
                break
            if state is not None:
                self._awaited -= 1
                if state.tried is not None:  # requested by the drafter, so not charged to the answer
                    self._tried = state.tried
                    self._since_s = self._clock()
                    continue
                self._spare_s = min(_SAVED_S, self._spare_s + self._granted_s) - state.seconds
                self._granted_s = 0.0
            if self._spare_s < 0 or (state is None and self._clock() - self._since_s > self._spare_s + _LATE_S):
                self._fail(f"it takes more than {_STEP_S * 1e3:.0f} ms for each token; make it simpler")
            elif state is None:
                return False
            elif not self._awaited:
                self._enter(state)
        return True

    @property
    def state(self) -> State:
        """The present position, as a source would send it."""
        return State([*self._forced], self._mask, self._complete, self._error)

    @property
    def complete(self) -> bool:
        """True if nothing more may come."""
        return not self._forced and self._complete

    @property
    def fault(self) -> str:
        """The reason why the answer cannot go on; empty if it can."""
        return "" if self._forced else self._error

    @property
    def over(self) -> bool:
        """True if no token can come: the answer is complete, or cannot go on."""
        return self.complete or bool(self.fault)

    def take(self, *tokens: int) -> None:
        """Continues the answer with these tokens, which must not end it. `mask` raises if the grammar refuses one."""
        for at, token in enumerate(tokens):
            if not self._forced:
                self._send(Follow([*tokens[at:]]))
                return
            if self._forced.popleft() != token:
                self._enter(State(error=f"the grammar does not allow token {token}"))
                return

    def look_ahead(self, tokens: Sequence[int], patience_s: float) -> list[bytes | int]:
        """Returns what may come after each of these tokens, as far as they may come next and others after them: a
        mask, or the one token that must. The answer stays where it is; what is not known after `patience_s` is left
        out."""
        forced = [*self._forced]
        ahead: list[bytes | int] = []
        for at, token in enumerate(tokens[: len(forced)]):
            if token != forced[at]:
                return ahead
            ahead.append(forced[at + 1] if at + 1 < len(forced) else self._mask)
        if len(ahead) < len(forced):
            return ahead
        if self._complete or self._error:
            return ahead[:-1]
        if self._awaited or len(ahead) == len(tokens):
            return ahead
        self._tried = []
        self._send(Follow([*tokens[len(ahead) :]], tries=True))
        self.wait(patience_s)
        return ahead + self._tried

    def forced(self, most: int) -> list[int]:
        """Takes at most `most` of the tokens that must come next, and returns them."""
        return [self._forced.popleft() for _ in range(min(most, len(self._forced)))]

    def mask(self) -> bytes:
        """Returns one bit per token, set for those that may come next, including those that end the answer.

        Raises:
            RequestError: the answer cannot go on: no token of the vocabulary is allowed, the last one was not allowed,
                or the grammar takes too much time or memory to follow.
        """
        if self.fault:
            raise RequestError(self.fault)
        return self.bit(self._forced[0]) if self._forced else self._mask

    def bit(self, token: int) -> bytes:
        """Returns the mask of one token."""
        mask = bytearray(-(-self.size // 8))
        mask[token // 8] = 1 << token % 8
        return bytes(mask)

    def restart(self, tokens: Sequence[int]) -> None:
        """Returns to the beginning of the answer and follows `tokens` from there."""
        self._send(Follow([*tokens], restart=True))

    def close(self) -> None:
        """Ends the answer. Later calls do nothing."""
        if not self._closed:
            self._closed = True
            self.source.close()

    def _send(self, step: Follow) -> None:
        self._since_s = self._clock()
        try:
            self.source.send(step)
        except RequestError as error:
            self._fail(str(error))
        else:
            self._awaited += 1
            self._granted_s += 0.0 if step.tries else _STEP_S * len(step.tokens)
            self.wait(0.0)

    def _fail(self, why: str) -> None:
        self._awaited = 0
        self._enter(State(error=f"the answer cannot follow its grammar: {why}"))

    def _enter(self, state: State) -> None:
        self._forced = deque(state.forced)
        self._mask = state.mask
        self._complete = state.complete
        self._error = state.error


# --- How an answer follows the grammar of its request, if it has one.

_JUMP_TOKENS = 64  # forced tokens of one step; the model computes the logits of all of them


class AnswerGrammar:
    """The grammar of one answer: it is compiled, then starts, then advances along every token. Without a grammar all
    tokens may come, and nothing waits. Owner: the engine thread."""

    def __init__(self, compiling: "Future[Grammar] | None", eos: Collection[int], *, draws_all: bool) -> None:
        """`eos` end an answer and are not followed. With `draws_all` no token counts as forced: all are drawn."""
        self.guide: Guide | None = None
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
        """Returns the masks after the first of these drafts, one each, as far as they may come and others after them,
        and the places of those drafts after which a token is forced. What is not known after `patience_s` is left
        out."""
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
        return self.guide is not None and self.guide.over

    @property
    def complete(self) -> bool:
        """True if the answer is complete."""
        return self.guide is not None and self.guide.complete

    @property
    def mask(self) -> "Mask | None":
        """The tokens that may come next. None if all may, or if none may, which `Generation.take` will find."""
        return None if self.guide is None or self.guide.over else self.guide.mask()

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
