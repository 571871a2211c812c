"""The drafts for the answers of an engine, from known text or by a model, if they pay.

All answers share a `Drafting`: the policy, the speed checks, earlier answers, and the model that drafts. Each answer
has an `AnswerDrafter`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from protocol.stats import DraftCounts, DraftModelState
from runner.cache.session import Session
from runner.drafts.costs import rows_of
from runner.drafts.draft_policy import FIRST_SLACK_S, MODEL_MATCH, SOURCES, Draft, DraftPolicy, Terms
from runner.drafts.lookup import Lookup, Ring
from runner.drafts.speed_check import SpeedCheck
from runner.engine.lifecycle import Lifecycle
from runner.engine.policy import UNLIMITED, StepLimit
from runner.logs import Log

if TYPE_CHECKING:
    from runner.engine.generation import Forward
    from runner.sampling.sampler import Sampler

log = Log(__name__)
_LOOK_WEIGHT = 1 / 8  # of the latest look in the average of what one takes
_INDEX_TOKENS = 512
"""The tokens of earlier answers that are indexed beside a step: half a millisecond."""
_VAIN_LOOKS, _RAREST = 8, 4
"""After 8 looks without a right draft an answer looks only in every second step, after 8 more in every fourth, and so
on to every sixteenth, but no more rarely than `_LOOK_SHARE` requires."""
_LOOK_SHARE = 0.005
"""The share of looks in vain in the time of plain steps. A look takes 0.2 to 1 ms right after a forward."""
_WINDOW, _LEAST_WINDOW = 16, 6
"""The tokens of plain steps in a window of the speed check, and the fewest steps of a window."""
_EARLIER_TOKENS = 1 << 18
"""The most tokens of all earlier answers together, at 20 bytes each."""


class DraftedAnswer(NamedTuple):
    """An answer of a forward that may have drafts."""

    drafter: "AnswerDrafter"
    session: Session
    most: int
    """The most drafts that the answer may have, at least one."""
    sampler: "Sampler"
    row: int
    """Its row in the forward."""
    position: int
    """The number of its tokens that the layers of the forward have seen."""


class DraftedStep(NamedTuple):
    """A step that may have drafts."""

    answers: Sequence[DraftedAnswer]
    """Its answers that may have drafts, at least one."""
    together: int
    """The number of all its answers."""
    limit: StepLimit = UNLIMITED
    layers: Sequence[object] = ()
    """The layers of its forward."""

    @property
    def context_tokens(self) -> int:
        """The tokens of the longest of `answers`, with its prompt."""
        return max(len(each.session.recorded) for each in self.answers)


class StepTime(NamedTuple):
    """The time of a step."""

    seconds: float
    tokens: int
    """The tokens that it brought to all answers."""
    together: int
    """The number of its answers."""
    length: int
    """The positions of each answer in its forward, with padding; 0 without a forward, -1 with several."""
    asked: float
    """The mean positions of an answer without padding, if padding is skipped; else `length`."""
    steps: int = 1
    """The number of steps since the last record, this one included; the others were plain."""


class DraftModel(Protocol):
    """A model that drafts for the answers of a forward. Owner: the engine thread.

    The `recorded` tokens of a session are its prompt and the answer so far. A model without a context of its own drafts
    from the layers of the answers' model. An exception of a method ends the use of the drafting model, but no answer.
    """

    name: str
    at_once: bool
    """True if it takes as long for many drafts as for one."""
    most_together: int
    """The most answers for which it drafts."""

    @property
    def nbytes(self) -> int:
        """The bytes of all but the weights."""
        ...

    def most_bytes(self, answers: int) -> int:
        """Returns the most bytes that all but the weights may take for this many answers."""
        ...

    def watch(self, forward: "Forward") -> "Forward":
        """Wraps the forward of the answers' model, if this model drafts from its results."""
        ...

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        """Reads a part of a text of which the model has too little to draft. Returns False if it had enough of any
        text.

        A part takes no longer than a short slice of a prompt. `briefly` asks for no more than a single try is worth.
        """
        ...

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        """Returns for each answer at most about `most` tokens that may come next, drawn as its sampler would draw them,
        or none if the model has read too little of its text. Changes no sampler. `layers` belong to the answers' model.
        Called after `read_texts` has returned False."""
        ...

    def free(self) -> None:
        """Forgets all texts, and frees everything but the weights."""
        ...


class Drafting:
    """Drafts for all answers of an engine, and learns from them. Owner: the engine thread."""

    def __init__(
        self,
        policy: DraftPolicy,
        undraftable: str = "",
        salt: str = "",
        model: DraftModel | None = None,
        clock: Callable[[], float] = monotonic,
        step_s: Callable[[float], float] = float,
    ) -> None:
        """Drafts nothing if `undraftable` gives a reason. Answers under different salts share no text. The `model`
        drafts for answers without known text. `clock` and `step_s` come from the sources."""
        self.policy = policy
        self.salt = salt
        self.undraftable = undraftable
        self.model = model
        self.clock = clock
        self.step_s = step_s
        # Learned from all answers.
        self.ring = Ring(_EARLIER_TOKENS)
        self._speeds: dict[tuple[int, bool], SpeedCheck] = {}
        self._model_fault = ""
        self.latest: list[AnswerDrafter] = []
        """The drafters of the latest step. The model drafts for answers that continue together, not in turns."""
        self._together = 1  # the answers of that step
        self.rarest = _RAREST
        """Looks in vain become as rare as one in 2 ** `rarest` steps."""
        self._look_s = 0.0  # the average time to look for known text and to choose from it
        self._looked_s = 0.0  # the latest such time
        self._wanted = 0  # the number of tokens that the model should draft next
        self.measuring = 0
        """The number of next steps to record: steps with drafts at hand, and the step after them."""
        # Of the present step.
        self._model_offered = False  # the step could have tried drafts of the model
        self._model_worked = False  # the model has worked for the step, or the step waits for it
        self.model_s = 0.0
        """The time that the model took."""
        # Since the start.
        self._rounds = 0
        self._drafted: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self._accepted: dict[str, int] = dict.fromkeys(SOURCES, 0)

    def drafter(self, prompt: Sequence[int]) -> "AnswerDrafter":
        return AnswerDrafter(self, prompt)

    def speed(self, together: int, *, by_model: bool = False) -> SpeedCheck:
        """Returns the check that compares plain steps of about this many answers with steps that draft known text or,
        `by_model`, with steps in which the model drafts."""
        key = (together - 1).bit_length(), by_model
        if key not in self._speeds:
            self._speeds[key] = SpeedCheck(max(_LEAST_WINDOW, _WINDOW // together))
            if by_model and self._model_fault:
                self._speeds[key].turn_off(self._model_fault)
        return self._speeds[key]

    def look(self, answers: Sequence[tuple["AnswerDrafter", Session]], step: int) -> bool:
        """Looks for known text for the answers of a forward whose drafters look in this step. Returns False if there is
        neither text nor a model that drafts: the usual and cheap case if no text repeats. Call it before `expects` or
        `propose`."""
        if self.model is not None:
            self.measuring = 2
        if self.undraftable:
            return self.model is not None
        self._look_s += (self._looked_s - self._look_s) * _LOOK_WEIGHT if self._look_s else self._looked_s
        started = self.clock()
        self.ring.index(_INDEX_TOKENS)
        found = [drafter.look(session, step) for drafter, session in answers]
        self._looked_s = self.clock() - started
        return any(found) or self.model is not None

    def expects(self, step: DraftedStep) -> bool:
        """Returns True if a round should follow the tokens that are on their way, which are not recorded yet. Then
        nothing is dispatched before the round."""
        started = self.clock()
        chosen = self._choose(step, ahead=1)
        self._looked_s += self.clock() - started
        return chosen or self._model_length(step) > 0

    def propose(self, step: DraftedStep) -> Sequence[Sequence[int]]:
        """Returns for each answer tokens that may follow the recorded ones, from known text or else by the model."""
        answers = step.answers
        expected = [each.drafter.check_expected(each.session) for each in answers]
        if not any(expected):
            self._choose(step, ahead=0)
        longest = max(len(draft.tokens) if (draft := each.drafter.chosen) is not None else 0 for each in answers)
        pads = step.together > 1 and longest and not self.policy.skips_padding  # a draft costs no more
        for each in answers:
            if pads and each.drafter.chosen is None:
                each.drafter.chosen = each.drafter.find(each.session, min(each.most, longest))
        if any(each.drafter.chosen is None for each in answers):
            for each, tokens in zip(answers, self._model_drafts(step), strict=True):
                if each.drafter.chosen is None and tokens:
                    each.drafter.chosen = Draft([*tokens[: each.most]], "model", MODEL_MATCH)
        drafts = [each.drafter.propose() for each in answers]
        if any(drafts):
            self.measuring = 2
        return drafts

    def _choose(self, step: DraftedStep, *, ahead: int) -> bool:
        """Chooses drafts of known text for each answer, of which the first `ahead` tokens are on their way. Returns
        True if an answer should wait for its draft."""
        answers, together = step.answers, step.together
        if self.undraftable or (longest := self.policy.longest(together)) < 1:
            return False
        found = [each.drafter.find(each.session, min(each.most + ahead, longest)) for each in answers]
        drafts = [draft for draft in found if draft is not None]
        lengths: Sequence[int] = ()
        if drafts:
            drafted_first = sorted(zip(answers, found, strict=True), key=lambda pair: pair[1] is None)
            slacks = [each.drafter.slack_s for each, _ in drafted_first]
            lengths = self.policy.lengths(drafts, Terms(step.context_tokens, together, step.limit, slacks))
        length_of = iter(lengths)
        allowed = self.speed(together).allows()
        for each, draft in zip(answers, found, strict=True):
            each.drafter.offer(draft, next(length_of) if draft is not None else 0, ahead, allowed=allowed)
        if any(lengths):
            self.measuring = 2
        return any(each.drafter.waits for each in answers)

    def _model_length(self, step: DraftedStep) -> int:
        """Returns the number of tokens that the model should draft now for each answer without known text. If it has
        too little of each text, it reads a part of one instead, and the result is 0."""
        answers, together = step.answers, step.together
        model, own = self.model, [each.drafter for each in answers]
        if model is None or together > model.most_together:
            return 0
        if self.latest and not any(each in self.latest for each in own):
            return 0
        beside = [draft for each in own if (draft := each.chosen) is not None]
        mosts = [each.most for each in answers if each.drafter.chosen is None]
        if not self._wanted:
            slacks = [each.slack_s for each in own if each.chosen is None]
            terms = Terms(step.context_tokens, together, step.limit, slacks)
            self._wanted = self.policy.model_length(mosts, terms, beside)
        self._model_offered |= self._wanted > 0
        if not self._wanted or not self.speed(together, by_model=True).allows():
            return 0
        self._model_worked = True
        started = self.clock()
        try:
            reads = model.read_texts(answers, briefly=self._wanted == 1)
        except Exception as error:  # costs drafts, never the answer
            self._drop_model(model, error)
            reads = True
        self.model_s += self.clock() - started
        padded = max((len(draft.tokens) for draft in beside), default=self._wanted)
        return 0 if reads else min(self._wanted, padded, max(mosts))

    def _model_drafts(self, step: DraftedStep) -> Sequence[Sequence[int]]:
        """Returns the model's drafts for all answers, so that it follows them all; none if drafts do not pay, or the
        model has read too little."""
        model, length, answers = self.model, self._model_length(step), step.answers
        drafts: Sequence[Sequence[int]] = [()] * len(answers)
        if model is None or not length:
            return drafts
        started = self.clock()
        try:
            drafts = model.propose(answers, step.layers, length)
        except Exception as error:  # as above
            self._drop_model(model, error)
        self._wanted = 0
        seconds = self.clock() - started
        self.model_s += seconds
        if any(drafts):
            self.policy.record_drafting(max(map(len, drafts)), seconds, step.together)
        return drafts

    def record_time(self, drafters: list["AnswerDrafter"], step: StepTime) -> None:
        """Records the time of a step, given the drafters of its answers."""
        context_tokens = max((each.known for each in drafters), default=0)
        rows = max(1, rows_of(step.asked, step.length))
        if step.length == 1:
            self.rarest = min(int(self._look_s / (_LOOK_SHARE * step.seconds)).bit_length(), _RAREST)
        if step.length > 1 or (step.length == 1 and not self._model_worked):
            self.policy.record_time(rows, step.seconds - self.model_s, context_tokens, step.together)
        drafted = any(each.drafted for each in drafters)
        offered = drafted or any(each.offered for each in drafters)
        self.speed(step.together).record(step.tokens, step.seconds, drafted=drafted, offered=offered)
        if self.model is not None:
            speed = self.speed(step.together, by_model=True)
            speed.record(step.tokens, step.seconds, drafted=self._model_worked, offered=self._model_offered)
        if drafters != self.latest:
            self._wanted = 0  # it was for other answers
        self.measuring = max(0, self.measuring - 1)
        self.latest, self._together = drafters, step.together
        self._model_offered = self._model_worked = False
        self.model_s = 0.0
        terms = Terms(context_tokens, step.together, slacks=[each.slack_s for each in drafters])
        after = self.policy.slacks_after(terms, [1 + each.right for each in drafters], rows, step.steps - 1)
        for each, slack_s in zip(drafters, after, strict=True):
            each.end_step(slack_s)

    def record_outcome(self, draft: Draft, taken: int, right: int) -> None:
        """Records that a round tried the first `taken` tokens of a draft, and that the first `right` were right."""
        self.policy.record_outcome(draft, taken, right)
        self._rounds += 1
        self._drafted[draft.source] += taken
        self._accepted[draft.source] += right

    def _drop_model(self, model: DraftModel, error: Exception) -> None:
        """Ends the use of the model, which has raised this error. Call it in the handler."""
        log.exception("the draft model failed; answers go on without it", model=model.name)
        self._model_fault = f"it failed: {type(error).__name__}"
        for (_, by_model), speed in self._speeds.items():
            if by_model:
                speed.turn_off(self._model_fault)
        with suppress(Exception):
            model.free()

    def counts(self) -> DraftCounts:
        state, why = self.speed(self._together).state
        if self.undraftable:
            state, why = "off", self.undraftable
        model = None
        if self.model is not None:
            model_state, model_why = self.speed(self._together, by_model=True).state
            model = DraftModelState(name=self.model.name, bytes=self.model.nbytes, state=model_state, why=model_why)
        drafted, accepted = {**self._drafted}, {**self._accepted}
        return DraftCounts(rounds=self._rounds, drafted=drafted, accepted=accepted, state=state, why=why, model=model)


class AnswerDrafter:
    """Drafts for one answer the continuation of matching text. Owner: the engine thread."""

    def __init__(self, shared: Drafting, prompt: Sequence[int]) -> None:
        """`prompt` has the keys of the prompt, negative ones for pictures."""
        self.shared = shared
        self._lookup = Lookup(prompt, shared.ring, shared.salt)
        self.known = len(prompt)
        """The number of tokens that the lookup has."""
        self.slack_s = FIRST_SLACK_S
        """The seconds by which rounds for other answers may still delay this one."""
        self.every = 1
        """The answer looks for drafts in each step whose number is a multiple of this power of two."""
        self.gives_up = False
        """True once a round had logits that are not numbers. No more drafts are tried."""
        self._vain = 0  # the looks since a draft was right
        self._expected: Draft | None = None  # the next round tries it after its first token, which is on its way
        # Of the present step.
        self._has_text = False
        self._on_path = False  # a path of the cache continues all of the text
        self.chosen: Draft | None = None
        """The draft to try."""
        self._draft: Draft | None = None  # the draft of the present round
        self.right = 0
        """The number of right drafts in the present round."""
        self.offered = False
        """True if the answer could have tried a draft of known text."""
        self.waits = False
        """True if nothing was dispatched, for such a draft."""

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` prompt tokens (about 1 µs each)."""
        self._lookup.index(tokens)

    def _looked_in_vain(self, times: int) -> None:
        self._vain = min(max(0, times), _VAIN_LOOKS * (self.shared.rarest + 1) - 1)
        self.every = 1 << self._vain // _VAIN_LOOKS

    def look(self, session: Session, step: int) -> bool:
        """Takes in the recorded tokens and looks for known text, if this is one of the answer's steps to do so. Returns
        True if there is some."""
        self._has_text = step % self.every == 0 and self._finds_text(session)
        return self._has_text

    def _finds_text(self, session: Session) -> bool:
        recorded = session.recorded
        found = self._lookup.extend(recorded[self.known :])
        self.known = len(recorded)
        if self.shared.model is None:
            self._looked_in_vain(self._vain + 1)
        self._on_path = bool(session.continuation(1))
        return self._on_path or found or self._expected is not None

    def find(self, session: Session, most: int) -> Draft | None:
        """Returns a draft of known text of at most `most` tokens; None if `look` found none in this step."""
        if not self._has_text:
            return None
        return Draft(session.continuation(most), "path", self.known) if self._on_path else self._lookup.propose(most)

    def offer(self, draft: Draft | None, length: int, ahead: int, *, allowed: bool) -> None:
        """Takes the first `length` tokens of a draft, of which the first `ahead` are on their way, if drafts are
        `allowed` now."""
        self.offered = draft is not None and length > 0
        if self.offered and not allowed:
            self._looked_in_vain(self._vain - 1)  # the speed check, which rests drafts, needs this one to count it
        taken = draft._replace(tokens=draft.tokens[:length]) if draft is not None and length and allowed else None
        if not ahead:
            self.chosen = taken
            return
        self.waits = taken is not None and len(taken.tokens) > ahead
        self._expected = taken if self.waits else None
        if self.waits:
            self.every = 1

    def check_expected(self, session: Session) -> bool:
        """Chooses the rest of the expected draft, if its first token is the one that was on its way. Returns True if a
        draft was expected."""
        draft, self._expected = self._expected, None
        if draft is None:
            return False
        if session.recorded[-1] == draft.tokens[0]:
            self.chosen = draft._replace(tokens=draft.tokens[1:])
        else:
            self.shared.policy.record_outcome(draft, 1, 0)
        return True

    def propose(self) -> Sequence[int]:
        """Returns the tokens of the chosen draft, which the round tries."""
        self._draft, self.chosen = self.chosen, None
        self.offered |= self.drafted
        return self._draft.tokens if self._draft is not None else ()

    def record_outcome(self, drafts: int, right: int, life: Lifecycle) -> None:
        """Records that `right` of the `drafts` of a round were right. Counts a model's drafts in `life`, too."""
        self.right = right
        if right:
            self._looked_in_vain(0)
        if self._draft is not None:
            self.shared.record_outcome(self._draft, drafts, right)
            if self._draft.source == "model":
                life.model_drafted += drafts
                life.model_accepted += right

    @property
    def drafted(self) -> bool:
        """True if the step has tried a draft of known text, or waits for one."""
        return (self._draft is not None and self._draft.source != "model") or self.waits

    def end_step(self, slack_s: float) -> None:
        """Ends the step, and sets the slack of the answer in seconds."""
        self.slack_s = slack_s
        self._draft, self.right = None, 0
        self.offered = self.waits = False

    def close(self) -> None:
        """Keeps the answer for later requests."""
        if self in self.shared.latest:
            self.shared.latest.remove(self)
        self.shared.ring.add(self._lookup.kept(), self.shared.salt)
