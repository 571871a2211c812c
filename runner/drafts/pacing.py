"""When a model drafts, and how many tokens: as many as pay, where nothing that is known suggests any."""

from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Protocol, TypeAlias

import mlx.core as mx

from protocol.stats import DraftModelState
from runner.cache.session import Session
from runner.drafts.guard import Guard
from runner.drafts.policy import DraftPolicy
from runner.logs import Log
from runner.sampling.sampler import Sampler

log = Log(__name__)

# --- A model that drafts, as answers see it.

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

    def read(self, session: Session, *, briefly: bool) -> bool:
        """Reads a part of the text if the model has too little of it to draft. Returns False if it had enough.

        A part takes no longer than a short slice of a prompt. `briefly` asks for as little as a single try is worth.
        """
        ...

    def propose(self, session: Session, most: int, sampler: Sampler) -> list[int]:
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


class ModelPacing:
    """What the answers of an engine share of the model that drafts for them. Owner: the engine thread."""

    def __init__(self, model: DraftModel, policy: DraftPolicy, clock: Callable[[], float] = monotonic) -> None:
        self.model = model
        self.policy = policy
        self.clock = clock
        policy.know_model(at_once=model.at_once)
        self.guard = Guard()
        """Compares steps with drafts of the model with plain ones, where nothing else was drafted."""

    def fail(self, error: Exception) -> None:
        """Ends the use of the model, which raised this error: it is being handled."""
        log.exception("the draft model failed; answers go on without it", model=self.model.name)
        self.guard.turn_off(f"it failed: {type(error).__name__}")
        with suppress(Exception):
            self.model.free()

    @property
    def state(self) -> DraftModelState:
        """Returns what becomes of the model's drafts."""
        state, why = self.guard.state
        return DraftModelState(name=self.model.name, bytes=self.model.nbytes, state=state, why=why)


class AnswerPacing:
    """Paces the model for one answer. Owner: the engine thread."""

    def __init__(self, shared: ModelPacing) -> None:
        self._shared = shared
        self._wanted = 0  # tokens of the next draft
        self._offered = False  # the present step could have been drafted
        self.worked = False
        """True if the model has worked for the present step, or the step waits for it."""
        self.seconds = 0.0
        """The time that the model has taken for the present step."""

    def expects(self, session: Session, most: int) -> bool:
        """Returns True if the model should draft behind the token that is on its way. If it lacks some of the text, it
        reads a part of it meanwhile."""
        return self._length(session, most) > 0 and not self._reads(session)

    def propose(self, session: Session, most: int, sampler: Sampler) -> list[int]:
        """Returns at most `most` drafts; none if they do not pay, or the model lacks some of the text."""
        length = self._length(session, most)
        if not length or self._reads(session):
            return []
        started, drafts = self._shared.clock(), list[int]()
        try:
            drafts = self._shared.model.propose(session, length, sampler)
        except Exception as error:  # costs drafts, never the answer
            self._shared.fail(error)
        self._wanted = 0
        self.seconds += self._shared.clock() - started
        if drafts:
            self._shared.policy.drafted(len(drafts), self._shared.clock() - started)
        return drafts

    def took(self, tokens: int, seconds: float) -> None:
        """Learns how long the present step took, which gave so many tokens."""
        self._shared.guard.took(tokens, seconds, drafted=self.worked, offered=self._offered)
        self._offered = self.worked = False
        self.seconds = 0.0

    def _length(self, session: Session, most: int) -> int:
        """Returns how many tokens to draft now."""
        shared = self._shared
        self._wanted = self._wanted or shared.policy.model_length(most, len(session.recorded))
        self._offered |= self._wanted > 0
        if not self._wanted or not shared.guard.allows():
            return 0
        self.worked = True
        return min(self._wanted, most)

    def _reads(self, session: Session) -> bool:
        started = self._shared.clock()
        try:
            return self._shared.model.read(session, briefly=self._wanted == 1)
        except Exception as error:  # as above
            self._shared.fail(error)
            return True
        finally:
            self.seconds += self._shared.clock() - started
