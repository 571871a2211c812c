"""The drafts for the answers of an engine, from known text or by a model, if drafts pay.

All answers share one `Drafting`. It owns the policy, the speed checks, the ring of earlier answers, and the model that
drafts. Each answer has an `AnswerDrafter`, which owns the lookup in known text."""

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
_LOOK_WEIGHT = 1 / 8  # the weight of the latest look in the average time of a look
_INDEX_TOKENS = 512
"""The tokens of earlier answers that are indexed in each step that looks: this lasts half a millisecond."""
_VAIN_LOOKS, _RAREST = 8, 4
"""After 8 looks without a right draft an answer looks only in every second step, after 8 more in every fourth, down to
every sixteenth (2 ** 4). It looks more often if looks then still stay below `_LOOK_SHARE`."""
_LOOK_SHARE = 0.005
"""The most time that unsuccessful looks may add, as a share of plain steps. A look lasts 0.2 to 1 ms."""
_WINDOW, _LEAST_WINDOW = 16, 6
"""The tokens that the plain steps of one window of a speed check yield, and the least number of its steps."""
_EARLIER_TOKENS = 1 << 18
"""The most tokens that the ring of earlier answers keeps, at 20 bytes each."""


class DraftedAnswer(NamedTuple):
    """An answer that may have drafts in the next forward."""

    drafter: "AnswerDrafter"
    session: Session
    most: int
    """The most drafts that the answer may have, at least one."""
    sampler: "Sampler"
    row: int
    """The answer's row in the forward."""
    position: int
    """The number of tokens of prompt and answer that the layers have seen before the forward."""


class DraftedStep(NamedTuple):
    """A step that may have drafts."""

    answers: Sequence[DraftedAnswer]
    """The answers that may have drafts, at least one."""
    together: int
    """The number of all answers in the step."""
    limit: StepLimit = UNLIMITED
    layers: Sequence[object] = ()
    """The layers with which the answering model computes the step."""

    @property
    def context_tokens(self) -> int:
        """The number of tokens of the longest of `answers`, with the tokens of its prompt."""
        return max(len(each.session.recorded) for each in self.answers)


class StepTime(NamedTuple):
    """The measured time of a step."""

    seconds: float
    tokens: int
    """The number of tokens that the step yielded, of all answers."""
    together: int
    """The number of answers in the step."""
    length: int
    """The rows of each answer in the step's forward, with padding; 0 if it had no forward, -1 if it had several."""
    asked: float
    """The mean rows of an answer without padding, if the forward skipped padding; else those of the latest forward."""
    steps: int = 1
    """The number of steps since the last record, with this one. All but this one were plain."""


class DraftModel(Protocol):
    """A model that drafts for the answers of a forward. Owner: the engine thread.

    The `recorded` tokens of a session are the prompt and the answer so far. A drafting model without a context of its
    own reads the answering model's layers. If a method raises an exception, answers go on without the drafting model.
    """

    name: str
    at_once: bool
    """True if the model makes many drafts in the time of one."""
    most_together: int
    """The most answers for which the model drafts in one step."""

    @property
    def nbytes(self) -> int:
        """The bytes that the model holds now beside its weights."""
        ...

    def most_bytes(self, answers: int) -> int:
        """Returns the most bytes that the model can hold beside its weights for this many answers."""
        ...

    def watch(self, forward: "Forward") -> "Forward":
        """Returns the answering model's `forward`, wrapped if the drafting model takes hidden states from it."""
        ...

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        """Reads a part of the texts that the model must know better before it can draft. Returns True if it can draft
        for none of them yet, so that `propose` would be useless.

        A part lasts no longer than a short slice of a prompt. With `briefly`, fewer tokens of a text are read: enough
        for a single try."""
        ...

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        """Returns for each answer about `most` tokens or fewer that may come next, drawn as the answer's sampler would
        draw them; none if the model has read too little of the text. Changes no sampler. `layers` are the answering
        model's. Call it after `read_texts` has returned False."""
        ...

    def free(self) -> None:
        """Forgets all texts, and frees all memory but that of the weights."""
        ...


class Drafting:
    """Finds drafts for all answers of an engine, and learns which of them pay. Owner: the engine thread."""

    def __init__(
        self,
        policy: DraftPolicy,
        undraftable: str = "",
        salt: str = "",
        model: DraftModel | None = None,
        clock: Callable[[], float] = monotonic,
        step_s: Callable[[float], float] = float,
    ) -> None:
        """`undraftable` is the reason why nothing may be drafted, if there is one. Answers under different salts share
        no text. The `model` drafts for answers without known text. `clock` and `step_s` are those of `Parts`."""
        self.policy = policy
        self.salt = salt
        self.undraftable = undraftable
        self.model = model
        self.clock = clock
        self.step_s = step_s
        # State that outlives a step, from all answers.
        self.ring = Ring(_EARLIER_TOKENS)
        self._speeds: dict[tuple[int, bool], SpeedCheck] = {}
        self._model_fault = ""
        self.latest: list[AnswerDrafter] = []
        """The drafters of the latest step. The model drafts only for a step with one of them: batches that take turns
        get no drafts of the model."""
        self._together = 1  # the number of answers in the latest step
        self.rarest = _RAREST
        """After many unsuccessful looks an answer still looks in one of 2 ** `rarest` steps."""
        self._look_s = 0.0  # the average time to look for known text and to choose from it
        self._looked_s = 0.0  # the latest time to look and to choose
        self._wanted = 0  # the number of tokens that the model should draft next
        self.measuring = 0
        """The number of coming steps whose times are recorded: a step with drafts at hand, and the step after it."""
        # Of the present step.
        self._model_offered = False  # drafts of the model would pay in this step
        self._model_worked = False  # the model has read or drafted in this step, or the step waits for its drafts
        self.model_s = 0.0
        """The seconds that the model has worked in this step."""
        # Since the start.
        self._rounds = 0
        self._drafted: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self._accepted: dict[str, int] = dict.fromkeys(SOURCES, 0)

    def drafter(self, prompt: Sequence[int]) -> "AnswerDrafter":
        return AnswerDrafter(self, prompt)

    def speed(self, together: int, *, by_model: bool = False) -> SpeedCheck:
        """Returns the speed check for steps of about this many answers. It compares plain steps with steps that draft
        known text; with `by_model`, it compares them with steps in which the model drafts."""
        key = (together - 1).bit_length(), by_model
        if key not in self._speeds:
            self._speeds[key] = SpeedCheck(max(_LEAST_WINDOW, _WINDOW // together))
            if by_model and self._model_fault:
                self._speeds[key].turn_off(self._model_fault)
        return self._speeds[key]

    def look(self, answers: Sequence[tuple["AnswerDrafter", Session]], step: int) -> bool:
        """Has the drafters of these answers look for known text in step number `step`. Returns False if there is
        neither text nor a model that drafts. Call it in each step before `expects` or `propose`."""
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
        """Returns True if the next step should be a round. Called while the tokens of this step are drawn but not yet
        read. If True, the caller dispatches no other forward before the round."""
        started = self.clock()
        chosen = self._choose(step, ahead=1)
        self._looked_s += self.clock() - started
        return chosen or self._model_length(step) > 0

    def propose(self, step: DraftedStep) -> Sequence[Sequence[int]]:
        """Returns for each answer the drafts to try after the recorded tokens: from known text, else by the model."""
        answers = step.answers
        expected = [each.drafter.check_expected(each.session) for each in answers]
        if not any(expected):
            self._choose(step, ahead=0)
        longest = max(len(draft.tokens) if (draft := each.drafter.chosen) is not None else 0 for each in answers)
        pads = step.together > 1 and longest and not self.policy.skips_padding  # a draft costs no more than padding
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
        """Chooses a draft of known text for each answer. The first `ahead` tokens of the draft stand for tokens that
        are drawn but not yet read. Returns True if the next step should be a round, for one of the drafts."""
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
        """Returns the number of tokens that the model should draft now for each answer without known text. If drafts
        pay, first has the model read parts of texts. The result is 0 if the model then cannot draft after any text."""
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
        except Exception as error:  # the answers go on without drafts of the model
            self._drop_model(model, error)
            reads = True
        self.model_s += self.clock() - started
        padded = max((len(draft.tokens) for draft in beside), default=self._wanted)
        return 0 if reads else min(self._wanted, padded, max(mosts))

    def _model_drafts(self, step: DraftedStep) -> Sequence[Sequence[int]]:
        """Returns the model's drafts for all answers, even those with known text, so that the model follows all texts.
        Returns none if drafts do not pay, or if the model has read too little."""
        model, length, answers = self.model, self._model_length(step), step.answers
        drafts: Sequence[Sequence[int]] = [()] * len(answers)
        if model is None or not length:
            return drafts
        started = self.clock()
        try:
            drafts = model.propose(answers, step.layers, length)
        except Exception as error:  # the answers go on, as above
            self._drop_model(model, error)
        self._wanted = 0
        seconds = self.clock() - started
        self.model_s += seconds
        if any(drafts):
            self.policy.record_drafting(max(map(len, drafts)), seconds, step.together)
        return drafts

    def record_time(self, drafters: list["AnswerDrafter"], step: StepTime) -> None:
        """Records the time of a step over the answers of `drafters`, and prepares for the next step."""
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
            self._wanted = 0  # the number was for other answers
        self.measuring = max(0, self.measuring - 1)
        self.latest, self._together = drafters, step.together
        self._model_offered = self._model_worked = False
        self.model_s = 0.0
        terms = Terms(context_tokens, step.together, slacks=[each.slack_s for each in drafters])
        after = self.policy.slacks_after(terms, [1 + each.right for each in drafters], rows, step.steps - 1)
        for each, slack_s in zip(drafters, after, strict=True):
            each.end_step(slack_s)

    def record_outcome(self, draft: Draft, taken: int, right: int) -> None:
        """Records that a round tried the first `taken` tokens of a draft, of which the first `right` were right."""
        self.policy.record_outcome(draft, taken, right)
        self._rounds += 1
        self._drafted[draft.source] += taken
        self._accepted[draft.source] += right

    def _drop_model(self, model: DraftModel, error: Exception) -> None:
        """Ends the use of the model, which has raised `error`. Call it in the `except` block: it logs the traceback."""
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
    """Finds known text for one answer, and holds the draft that its next round tries. Owner: the engine thread."""

    def __init__(self, shared: Drafting, prompt: Sequence[int]) -> None:
        """`prompt` has the tokens of the prompt; negative numbers stand for soft tokens."""
        self.shared = shared
        self._lookup = Lookup(prompt, shared.ring, shared.salt)
        self.known = len(prompt)
        """The number of tokens of prompt and answer that the lookup has."""
        self.slack_s = FIRST_SLACK_S
        """The seconds by which rounds for other answers may still delay this answer."""
        self.every = 1
        """A power of two: the answer looks for drafts in each step whose number is a multiple of `every`."""
        self.gives_up = False
        """True after a round with logits that are NaN or infinite. Then the answer tries no more drafts."""
        self._vain = 0  # the number of looks since a draft was right
        self._expected: Draft | None = None  # its first token should be the drawn one; the next round tries the rest
        # Of the present step.
        self._has_text = False  # there is known text to draft from
        self._on_path = False  # a conversation in the prefix cache continues the whole text
        self.chosen: Draft | None = None
        """The draft that the next round tries."""
        self._draft: Draft | None = None  # the draft of the present round
        self.right = 0
        """The number of right drafts in the present round."""
        self.offered = False
        """True if a draft of known text would pay in this step, even if the speed check rests drafts."""
        self.waits = False
        """True if nothing was dispatched ahead, because the next step should try a draft of known text."""

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` tokens of the prompt for the lookup, in about 1 µs a token."""
        self._lookup.index(tokens)

    def _looked_in_vain(self, times: int) -> None:
        self._vain = min(max(0, times), _VAIN_LOOKS * (self.shared.rarest + 1) - 1)
        self.every = 1 << self._vain // _VAIN_LOOKS

    def look(self, session: Session, step: int) -> bool:
        """Looks for known text after the recorded tokens, if the number `step` is a multiple of `every`. Returns True
        if there is known text."""
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
        """Returns a draft of at most `most` tokens of known text; None if `look` found no text in this step."""
        if not self._has_text:
            return None
        return Draft(session.continuation(most), "path", self.known) if self._on_path else self._lookup.propose(most)

    def offer(self, draft: Draft | None, length: int, ahead: int, *, allowed: bool) -> None:
        """Chooses the first `length` tokens of a draft, if the speed check has `allowed` drafts. The first `ahead` of
        them stand for tokens that are drawn but not yet read."""
        self.offered = draft is not None and length > 0
        if self.offered and not allowed:
            self._looked_in_vain(self._vain - 1)  # not in vain: the speed check rests drafts, but has to count this one
        taken = draft._replace(tokens=draft.tokens[:length]) if draft is not None and length and allowed else None
        if not ahead:
            self.chosen = taken
            return
        self.waits = taken is not None and len(taken.tokens) > ahead
        self._expected = taken if self.waits else None
        if self.waits:
            self.every = 1

    def check_expected(self, session: Session) -> bool:
        """Chooses the rest of the expected draft, if its first token is the last recorded one. Returns True if a draft
        was expected, even if its first token was wrong."""
        draft, self._expected = self._expected, None
        if draft is None:
            return False
        if session.recorded[-1] == draft.tokens[0]:
            self.chosen = draft._replace(tokens=draft.tokens[1:])
        else:
            self.shared.policy.record_outcome(draft, 1, 0)
        return True

    def propose(self) -> Sequence[int]:
        """Returns the tokens of the chosen draft, which becomes the draft of the present round."""
        self._draft, self.chosen = self.chosen, None
        self.offered |= self.drafted
        return self._draft.tokens if self._draft is not None else ()

    def record_outcome(self, drafts: int, right: int, life: Lifecycle) -> None:
        """Records that the first `right` of the answer's `drafts` in a round were right. Counts a model's drafts in
        `life`, too."""
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
        """True if the step has tried a draft of known text, or if the answer `waits`."""
        return (self._draft is not None and self._draft.source != "model") or self.waits

    def end_step(self, slack_s: float) -> None:
        """Ends the step. `slack_s` is the answer's slack from now on."""
        self.slack_s = slack_s
        self._draft, self.right = None, 0
        self.offered = self.waits = False

    def close(self) -> None:
        """Ends the answer, and adds it to the ring, from which later requests can draft."""
        if self in self.shared.latest:
            self.shared.latest.remove(self)
        self.shared.ring.add(self._lookup.kept(), self.shared.salt)
