"""Drafts for the answers of an engine: looked up in text that is known, as many as pay.

`Drafting` is what all answers share: the policy, the guard, earlier answers, and the verdict whether the model may
draft. `AnswerDrafter` is the drafter of one of them.
"""

from collections.abc import Callable, Sequence
from time import monotonic

from protocol.stats import DraftCounts
from runner.cache.session import Session
from runner.drafts.guard import Guard
from runner.drafts.lookup import Lookup, Ring
from runner.drafts.pacing import AnswerPacing, DraftModel, ModelPacing
from runner.drafts.policy import MODEL_MATCH, SOURCES, Draft, DraftPolicy
from runner.engine.lifecycle import Lifecycle
from runner.sampling.sampler import Sampler

_INDEX_TOKENS = 512
"""Tokens of an earlier answer that are indexed beside a step: half a millisecond."""
_EARLIER_TOKENS = 1 << 18
"""Of all earlier answers together, at 20 bytes each."""


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
        self.guard = Guard()
        self.ring = Ring(_EARLIER_TOKENS)
        self.salt = salt
        self.model = None if model is None else ModelPacing(model, policy, clock)
        self.undraftable = undraftable
        self._rounds = 0
        self._drafted: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self._accepted: dict[str, int] = dict.fromkeys(SOURCES, 0)

    def drafter(self, prompt: Sequence[int]) -> "AnswerDrafter":
        """Returns a drafter for the answer to this prompt."""
        return AnswerDrafter(self, prompt)

    def learn(self, draft: Draft, taken: int, right: int) -> None:
        """Learns that of the first `taken` tokens of a draft the first `right` were right."""
        self.policy.learned(draft, taken, right)
        self._rounds += 1
        self._drafted[draft.source] += taken
        self._accepted[draft.source] += right

    def counts(self) -> DraftCounts:
        """Returns the counts so far."""
        state, why = self.guard.state
        if self.undraftable:
            state, why = "off", self.undraftable
        return DraftCounts(
            rounds=self._rounds,
            drafted={**self._drafted},
            accepted={**self._accepted},
            state=state,
            why=why,
            model=None if self.model is None else self.model.state,
        )


class AnswerDrafter:
    """Proposes what followed when the text of one request stood like this before; else, what a model drafts. Owner: the
    engine thread."""

    def __init__(self, shared: Drafting, prompt: Sequence[int]) -> None:
        """`prompt` are the keys of a prompt: those of pictures are negative."""
        self._shared = shared
        self._lookup = Lookup(prompt, shared.ring, shared.salt)
        self._known = len(prompt)  # tokens that the lookup has
        self._expected: Draft | None = None  # what the next round tries, the token on its way being the first
        self._draft: Draft | None = None  # what the present round tries
        self._offered = False  # the present step could have tried a draft
        self._waited = False  # the present step dispatched nothing
        self._model = None if shared.model is None else AnswerPacing(shared.model)
        self.life: Lifecycle | None = None
        """Where the drafts of a model are counted."""

    def index(self, tokens: int) -> None:
        """Indexes so many more tokens of the prompt, a microsecond each."""
        self._lookup.index(tokens)

    def expects(self, session: Session, most: int) -> bool:
        """Returns True if a round should follow the token that is on its way, of which nothing is recorded yet."""
        draft = self._choose(session, most + 1)
        self._waited = draft is not None and len(draft.tokens) > 1
        self._expected = draft if self._waited else None
        return self._waited or (self._model is not None and self._model.expects(session, most))

    def propose(self, session: Session, most: int, sampler: Sampler) -> Sequence[int]:
        """Returns at most `most` tokens to try behind the recorded ones."""
        draft, self._expected = self._expected, None
        if draft is None:
            draft = self._choose(session, most)
        elif session.recorded[-1] != draft.tokens[0]:
            self._shared.policy.learned(draft, 1, 0)
            draft = None
        else:
            draft = draft._replace(tokens=draft.tokens[1:])
        self._offered |= draft is not None
        if draft is None and self._model is not None and (tokens := self._model.propose(session, most, sampler)):
            draft = Draft(tokens, "model", MODEL_MATCH)
        self._draft = draft
        return draft.tokens[:most] if draft is not None else ()

    def learn(self, drafts: int, right: int) -> None:
        """Learns how many drafts of a round were right."""
        if self._draft is not None and drafts:
            self._shared.learn(self._draft, drafts, right)
            if self.life is not None and self._draft.source == "model":
                self.life.model_drafted += drafts
                self.life.model_accepted += right

    def took(self, tokens: int, rows: int, seconds: float) -> None:
        """Learns how long a step took that gave so many tokens. `rows` is the length of its forward; 0 if it had none,
        -1 if it had several."""
        draft, model = self._draft, self._model
        if rows > 1 or (rows == 1 and not (model is not None and model.worked)):
            self._shared.policy.took(rows, seconds - (model.seconds if model is not None else 0.0), self._known)
        drafted = (draft is not None and draft.source != "model") or self._waited
        self._shared.guard.took(tokens, seconds, drafted=drafted, offered=drafted or self._offered)
        if model is not None:
            model.took(tokens, seconds)
        self._draft, self._offered, self._waited = None, False, False

    def close(self) -> None:
        """Keeps the answer for later requests."""
        self._shared.ring.add(self._lookup.kept(), self._shared.salt)

    def _choose(self, session: Session, most: int) -> Draft | None:
        """Returns a draft that is worth its rows, or None. A path of the cache comes first: it has all of the text."""
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
        allowed = length > 0 and shared.guard.allows()
        return draft._replace(tokens=draft.tokens[:length]) if draft is not None and allowed else None
