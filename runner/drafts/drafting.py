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
from runner.engine.ports import DraftedAnswer, Drafter, Drafts, StepTime
from runner.logs import Log
from runner.sampling.sampler import Sampler

if TYPE_CHECKING:
    from runner.engine.generation import Forward

log = Log(__name__)
_INDEX_TOKENS = 512
"""Tokens of an earlier answer that are indexed beside a step: half a millisecond."""
_FIRST_VAIN, _MOST_VAIN = 5, 3
"""After 2 ** 5 steps of an answer without a draft that was worth its rows one is looked for in every second step only,
after twice as many in every fourth, then in every eighth: it takes some 50 microseconds."""
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
        self._speeds: dict[int, SpeedCheck] = {}
        self.latest: AnswerDrafter | None = None
        """Of the first answer of the latest step. A model follows one text: it drafts for none of those that take
        turns."""
        self.model_speed = SpeedCheck()
        """Compares steps with drafts of the model with plain ones, where no known text was drafted."""
        self._rounds = 0
        self._drafted: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self._accepted: dict[str, int] = dict.fromkeys(SOURCES, 0)

    def drafter(self, prompt: Sequence[int]) -> "AnswerDrafter":
        """Returns a drafter for the answer to this prompt."""
        return AnswerDrafter(self, prompt)

    def speed(self, together: int) -> SpeedCheck:
        """Returns what compares steps with drafts of known text with plain ones, of about as many answers."""
        size = (together - 1).bit_length()
        if size not in self._speeds:
            self._speeds[size] = SpeedCheck()
        return self._speeds[size]

    def expects(self, answers: Sequence[DraftedAnswer], together: int) -> bool:
        """Returns True if a round should follow the tokens that are on their way, which are not recorded yet."""
        waits = self._choose(answers, together, ahead=1)
        return waits or (together == 1 and _own(answers[0]).model_length(answers[0].session, answers[0].most) > 0)

    def propose(self, answers: Sequence[DraftedAnswer], together: int) -> Sequence[Sequence[int]]:
        """Returns for each answer tokens that may follow the recorded ones."""
        expected = [_own(each).check_expected(each.session) for each in answers]
        if not any(expected):
            self._choose(answers, together, ahead=0)
        longest = max(len(draft.tokens) if (draft := _own(each).chosen) is not None else 0 for each in answers)
        for each in answers:
            if _own(each).chosen is None and longest and together > 1:  # it would be padded
                _own(each).chosen = _own(each).find(each.session, min(each.most, longest))
        return [_own(each).propose(each, alone=together == 1) for each in answers]

    def _choose(self, answers: Sequence[DraftedAnswer], together: int, *, ahead: int) -> bool:
        """Chooses what to draft of known text for each answer, `ahead` tokens of which are on their way. Returns True
        if that is anything."""
        if self.undraftable or (longest := self.policy.longest(together)) < 1:
            return False
        self.ring.index(_INDEX_TOKENS)
        found = [_own(each).find(each.session, min(each.most + ahead, longest)) for each in answers]
        drafts = [draft for draft in found if draft is not None]
        context_tokens = max(len(each.session.recorded) for each in answers)
        length = self.policy.length(drafts, context_tokens, together) if drafts else 0
        allowed = self.speed(together).allows()
        for each, draft in zip(answers, found, strict=True):
            _own(each).offer(draft, length, ahead, allowed=allowed)
        return any(_own(each).waits for each in answers)

    def record_time(self, drafters: Sequence[Drafter], step: StepTime) -> None:
        """Records how long a step took, given the drafters of its answers."""
        own = [each for each in drafters if isinstance(each, AnswerDrafter)]
        if step.length > 1 or (step.length == 1 and not any(each.model_worked for each in own)):
            seconds = step.seconds - sum(each.model_s for each in own)
            self.policy.record_time(step.length, seconds, max(each.known for each in own), step.together)
        drafted = any(each.drafted for each in own)
        offered = drafted or any(each.offered for each in own)
        self.speed(step.together).record(step.tokens, step.seconds, drafted=drafted, offered=offered)
        if self.model is not None and step.together == 1:
            worked, model_offered = own[0].model_worked, own[0].model_offered
            self.model_speed.record(step.tokens, step.seconds, drafted=worked, offered=model_offered)
        self.latest = own[0]
        for each in own:
            each.end_step()

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
        state, why = self.speed(1).state
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
        self.shared: Drafts = shared
        self._shared = shared
        # Of the answer.
        self._lookup = Lookup(prompt, shared.ring, shared.salt)
        self.known = len(prompt)
        """The tokens that the lookup has."""
        self._vain = 0  # looks in a row for a draft that was worth its rows
        self._wanted = 0  # tokens that the model should draft next
        self._expected: Draft | None = None  # what the next round tries, the token on its way being the first
        # Of the present step.
        self.chosen: Draft | None = None
        """What it should try of known text."""
        self._draft: Draft | None = None  # what its round tries
        self.offered = False
        """True if it could have tried a draft of known text."""
        self.waits = False
        """True if it dispatched nothing for such a draft."""
        self.model_offered = False
        """True if it could have tried a draft of the model."""
        self.model_worked = False
        """True if the model has worked for it, or it waits for the model."""
        self.model_s = 0.0
        """The time that the model took."""

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` prompt tokens (about 1 µs each)."""
        self._lookup.index(tokens)

    def find(self, session: Session, most: int) -> Draft | None:
        """Returns a draft of known text of at most `most` tokens; None if there is none, or it is not looked for. A
        path of the cache comes first: it has all of the text."""
        self._vain += 1
        if self._vain % (1 << min(_MOST_VAIN, max(0, self._vain.bit_length() - _FIRST_VAIN))):
            return None
        recorded = session.recorded
        self._lookup.extend(recorded[self.known :])
        self.known = len(recorded)
        path = session.continuation(most)
        return Draft(path, "path", len(recorded)) if path else self._lookup.propose(most)

    def offer(self, draft: Draft | None, length: int, ahead: int, *, allowed: bool) -> None:
        """Takes the first `length` tokens of a draft that was found, `ahead` of which are on their way, if drafts are
        `allowed` now."""
        self.offered = draft is not None and length > 0
        if self.offered:
            self._vain = 0
        taken = draft._replace(tokens=draft.tokens[:length]) if draft is not None and length and allowed else None
        if not ahead:
            self.chosen = taken
            return
        self.waits = taken is not None and len(taken.tokens) > ahead
        self._expected = taken if self.waits else None

    def check_expected(self, session: Session) -> bool:
        """Chooses the rest of what was expected, if the token that was on its way begins it. Returns True if something
        was expected."""
        draft, self._expected = self._expected, None
        if draft is None:
            return False
        if session.recorded[-1] == draft.tokens[0]:
            self.chosen = draft._replace(tokens=draft.tokens[1:])
        else:
            self._shared.policy.record_outcome(draft, 1, 0)
        return True

    def propose(self, answer: DraftedAnswer, *, alone: bool) -> Sequence[int]:
        """Returns what was chosen; if that is nothing, and it is computed `alone`, what the model drafts."""
        draft, self.chosen = self.chosen, None
        self.offered |= draft is not None
        if draft is None and alone and (tokens := self._model_drafts(answer.session, answer.most, answer.sampler)):
            draft = Draft(tokens, "model", MODEL_MATCH)
        self._draft = draft
        return draft.tokens[: answer.most] if draft is not None else ()

    def record_outcome(self, drafts: int, right: int, life: Lifecycle) -> None:
        """Records how many drafts of a round were right; those of a model in `life`, the counts of the answer, too."""
        if self._draft is not None:
            self._shared.record_outcome(self._draft, drafts, right)
            if self._draft.source == "model":
                life.model_drafted += drafts
                life.model_accepted += right

    @property
    def drafted(self) -> bool:
        """True if the step has tried, or waits for, a draft of known text."""
        return (self._draft is not None and self._draft.source != "model") or self.waits

    def end_step(self) -> None:
        """Ends the step."""
        self._draft = None
        self.offered = self.waits = self.model_offered = self.model_worked = False
        self.model_s = 0.0

    def close(self) -> None:
        """Keeps the answer for later requests."""
        if self._shared.latest is self:
            self._shared.latest = None
        self._shared.ring.add(self._lookup.kept(), self._shared.salt)

    def model_length(self, session: Session, most: int) -> int:
        """Returns how many tokens the model should draft now. If it lacks some of the text, it reads a part of it
        meanwhile, and the result is 0."""
        shared, model = self._shared, self._shared.model
        if model is None or shared.latest not in (None, self):
            return 0
        self._wanted = self._wanted or shared.policy.model_length(most, len(session.recorded))
        self.model_offered |= self._wanted > 0
        if not self._wanted or not shared.model_speed.allows():
            return 0
        self.model_worked = True
        started = shared.clock()
        try:
            reads = model.read(session, briefly=self._wanted == 1)
        except Exception as error:  # costs drafts, never the answer
            shared.drop_model(model, error)
            reads = True
        self.model_s += shared.clock() - started
        return 0 if reads else min(self._wanted, most)

    def _model_drafts(self, session: Session, most: int, sampler: Sampler) -> list[int]:
        """Returns at most `most` drafts of the model; none if they do not pay, or it lacks some of the text."""
        shared, model = self._shared, self._shared.model
        length = self.model_length(session, most)
        if model is None or not length:
            return []
        started, drafts = shared.clock(), list[int]()
        try:
            drafts = model.propose(session, length, sampler)
        except Exception as error:  # as above
            shared.drop_model(model, error)
        self._wanted = 0
        self.model_s += shared.clock() - started
        if drafts:
            shared.policy.record_drafting(len(drafts), shared.clock() - started)
        return drafts


def _own(answer: DraftedAnswer) -> AnswerDrafter:
    assert isinstance(answer.drafter, AnswerDrafter)
    return answer.drafter
