"""The drafts for the answers of an engine: from text that is known, or by a model, if they pay.

`Drafting` is what all answers share: the policy, the speed checks, earlier answers, and the verdict whether the model
may draft. `AnswerDrafter` is the drafter of one of them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from protocol.stats import DraftCounts, DraftModelState
from runner.cache.session import Session
from runner.drafts.lookup import Lookup, Ring
from runner.drafts.policy import MODEL_MATCH, SOURCES, Draft, DraftPolicy
from runner.drafts.speed_check import SpeedCheck
from runner.engine.lifecycle import Lifecycle
from runner.logs import Log
from runner.sampling.sampler import Sampler

if TYPE_CHECKING:
    from runner.engine.generation import Forward

log = Log(__name__)
_INDEX_TOKENS = 512
"""Tokens of an earlier answer that are indexed beside a step: half a millisecond."""
_EARLIER_TOKENS = 1 << 18
"""Of all earlier answers together, at 20 bytes each."""


class DraftModel(Protocol):
    """A model that drafts for one answer after the other. Owner: the engine thread.

    `session` is that of the answer. Its `recorded` tokens are all of the prompt and the answer so far; a model without
    a context of its own finds there what the answer's model has computed for them. Whatever a method raises ends the
    use of the model, and no answer.
    """

    name: str
    at_once: bool
    """True if it takes as long for many drafts as for one."""
    most_bytes: int
    """The bytes that all but the weights may take."""

    @property
    def nbytes(self) -> int:
        """The bytes of all but the weights."""
        ...

    def watch(self, forward: "Forward") -> "Forward":
        """Returns the forward of the answer's model, which shows this one what it computes if it draws on that."""
        ...

    def read(self, session: Session, *, briefly: bool) -> bool:
        """Reads a part of the text if the model has too little of it to draft. Returns False if it had enough.

        A part takes no longer than a short slice of a prompt. `briefly` asks for as little as a single try is worth.
        """
        ...

    def propose(self, session: Session, most: int, sampler: Sampler) -> list[int]:
        """Returns at most `most` tokens, at least one, that may come next, drawn as the answer's `sampler` would draw
        them; the sampler stays as it is. Called when `read` has returned False."""
        ...

    def free(self) -> None:
        """Frees all but the weights, and forgets the text."""
        ...


class Drafting:
    """What all drafted answers of an engine share. Owner: the engine thread."""

    def __init__(
        self,
        policy: DraftPolicy,
        undraftable: str = "",
        salt: str = "",
        model: DraftModel | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Nothing is drafted if there is a reason why the model must not. Answers under different salts know nothing of
        each other. The `model` drafts where no known text does."""
        self.policy = policy
        self.salt = salt
        self.undraftable = undraftable
        self.model = model
        self.clock = clock
        # What is learned from all answers.
        self.ring = Ring(_EARLIER_TOKENS)
        self.speed = SpeedCheck()
        """Compares steps with drafts of known text with plain ones."""
        self.model_speed = SpeedCheck()
        """Compares steps with drafts of the model with plain ones, where no known text was drafted."""
        self._rounds = 0
        self._drafted: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self._accepted: dict[str, int] = dict.fromkeys(SOURCES, 0)

    def drafter(self, prompt: Sequence[int]) -> "AnswerDrafter":
        """Returns a drafter for the answer to this prompt."""
        return AnswerDrafter(self, prompt)

    def record_outcome(self, draft: Draft, taken: int, right: int) -> None:
        """Records that of the first `taken` tokens of a draft the first `right` were right."""
        self.policy.record_outcome(draft, taken, right)
        self._rounds += 1
        self._drafted[draft.source] += taken
        self._accepted[draft.source] += right

    def drop_model(self, model: DraftModel, error: Exception) -> None:
        """Ends the use of the model, which raised this error: it is being handled."""
        log.exception("the draft model failed; answers go on without it", model=model.name)
        self.model_speed.turn_off(f"it failed: {type(error).__name__}")
        with suppress(Exception):
            model.free()

    def counts(self) -> DraftCounts:
        """Returns the counts so far."""
        state, why = self.speed.state
        if self.undraftable:
            state, why = "off", self.undraftable
        model = None
        if self.model is not None:
            model_state, model_why = self.model_speed.state
            model = DraftModelState(name=self.model.name, bytes=self.model.nbytes, state=model_state, why=model_why)
        return DraftCounts(
            rounds=self._rounds,
            drafted={**self._drafted},
            accepted={**self._accepted},
            state=state,
            why=why,
            model=model,
        )


class AnswerDrafter:
    """Drafts the continuation of the last matching text; where there is none, a model drafts. Owner: the engine
    thread."""

    def __init__(self, shared: Drafting, prompt: Sequence[int]) -> None:
        """`prompt` are the keys of a prompt: those of pictures are negative."""
        self._shared = shared
        # Of the answer.
        self._lookup = Lookup(prompt, shared.ring, shared.salt)
        self._known = len(prompt)  # tokens that the lookup has
        self._wanted = 0  # tokens that the model should draft next
        self._expected: Draft | None = None  # what the next round tries, the token on its way being the first
        # Of the present step.
        self._draft: Draft | None = None  # what its round tries
        self._offered = False  # it could have tried a draft of known text
        self._waited = False  # it dispatched nothing
        self._model_offered = False  # it could have tried a draft of the model
        self._model_worked = False  # the model has worked for it, or it waits for the model
        self._model_s = 0.0  # the time that the model took

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` prompt tokens (about 1 µs each)."""
        self._lookup.index(tokens)

    def expects(self, session: Session, most: int) -> bool:
        """Returns True if a round should follow the token that is on its way, which is not recorded yet."""
        draft = self._choose(session, most + 1)
        self._waited = draft is not None and len(draft.tokens) > 1
        self._expected = draft if self._waited else None
        return self._waited or self._model_length(session, most) > 0

    def propose(self, session: Session, most: int, sampler: Sampler) -> Sequence[int]:
        """Returns at most `most` tokens that may follow the recorded ones."""
        draft, self._expected = self._expected, None
        if draft is None:
            draft = self._choose(session, most)
        elif session.recorded[-1] != draft.tokens[0]:
            self._shared.policy.record_outcome(draft, 1, 0)
            draft = None
        else:
            draft = draft._replace(tokens=draft.tokens[1:])
        self._offered |= draft is not None
        if draft is None and (tokens := self._model_drafts(session, most, sampler)):
            draft = Draft(tokens, "model", MODEL_MATCH)
        self._draft = draft
        return draft.tokens[:most] if draft is not None else ()

    def record_outcome(self, drafts: int, right: int, life: Lifecycle) -> None:
        """Records how many drafts of a round were right; those of a model in `life`, the counts of the answer, too."""
        if self._draft is not None and drafts:
            self._shared.record_outcome(self._draft, drafts, right)
            if self._draft.source == "model":
                life.model_drafted += drafts
                life.model_accepted += right

    def record_time(self, tokens: int, rows: int, seconds: float) -> None:
        """Records how long a step of `tokens` tokens took. `rows` is the length of its forward; 0 if it had none, -1
        if it had several."""
        shared, draft = self._shared, self._draft
        if rows > 1 or (rows == 1 and not self._model_worked):
            shared.policy.record_time(rows, seconds - self._model_s, self._known)
        drafted = (draft is not None and draft.source != "model") or self._waited
        shared.speed.record(tokens, seconds, drafted=drafted, offered=drafted or self._offered)
        if shared.model is not None:
            shared.model_speed.record(tokens, seconds, drafted=self._model_worked, offered=self._model_offered)
        self._draft = None
        self._offered = False
        self._waited = False
        self._model_offered = False
        self._model_worked = False
        self._model_s = 0.0

    def close(self) -> None:
        """Keeps the answer for later requests."""
        self._shared.ring.add(self._lookup.kept(), self._shared.salt)

    def _choose(self, session: Session, most: int) -> Draft | None:
        """Returns a draft of known text that is worth its rows, or None. A path of the cache comes first: it has all of
        the text."""
        shared, recorded = self._shared, session.recorded
        if shared.undraftable:
            return None
        shared.ring.index(_INDEX_TOKENS)
        self._lookup.extend(recorded[self._known :])
        self._known = len(recorded)
        most = min(most, shared.policy.most)
        path = session.continuation(most)
        draft = Draft(path, "path", len(recorded)) if path else self._lookup.propose(most)
        length = shared.policy.length(draft, len(recorded)) if draft is not None else 0
        self._offered = length > 0
        allowed = length > 0 and shared.speed.allows()
        return draft._replace(tokens=draft.tokens[:length]) if draft is not None and allowed else None

    def _model_length(self, session: Session, most: int) -> int:
        """Returns how many tokens the model should draft now. If it lacks some of the text, it reads a part of it
        meanwhile, and the result is 0."""
        shared, model = self._shared, self._shared.model
        if model is None:
            return 0
        self._wanted = self._wanted or shared.policy.model_length(most, len(session.recorded))
        self._model_offered |= self._wanted > 0
        if not self._wanted or not shared.model_speed.allows():
            return 0
        self._model_worked = True
        started = shared.clock()
        try:
            reads = model.read(session, briefly=self._wanted == 1)
        except Exception as error:  # costs drafts, never the answer
            shared.drop_model(model, error)
            reads = True
        self._model_s += shared.clock() - started
        return 0 if reads else min(self._wanted, most)

    def _model_drafts(self, session: Session, most: int, sampler: Sampler) -> list[int]:
        """Returns at most `most` drafts of the model; none if they do not pay, or it lacks some of the text."""
        shared, model = self._shared, self._shared.model
        length = self._model_length(session, most)
        if model is None or not length:
            return []
        started, drafts = shared.clock(), list[int]()
        try:
            drafts = model.propose(session, length, sampler)
        except Exception as error:  # as above
            shared.drop_model(model, error)
        self._wanted = 0
        self._model_s += shared.clock() - started
        if drafts:
            shared.policy.record_drafting(len(drafts), shared.clock() - started)
        return drafts
