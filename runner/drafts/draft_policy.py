"""Decides how many tokens of a draft are worth their rows, from numbers alone: it uses no model and no clock."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from runner.drafts.acceptance import BLOCK_PAUSE, LOOKUP_PAUSE, MODEL_PAUSE, Acceptance, match_class
from runner.drafts.costs import CPU_COSTS, MOST_ROWS, DraftCost, RoundCosts, cost_of, rows_of
from runner.engine.policy import UNLIMITED, StepLimit
from runner.settings import DEFAULT_DRAFT_TOKENS

Source = Literal["own", "earlier", "path", "model"]
"""The source of a draft: the request's own text, the answer of an earlier request, a conversation in the prefix cache
that begins with the whole text of the request, or a model that drafts."""
SOURCES: tuple[Source, ...] = get_args(Source)
MODEL_MATCH = 5
"""The assumed match of a model's drafts, which match no known text. Until rounds are counted, they are trusted like
known text of which this many tokens match."""


class Draft(NamedTuple):
    """Tokens that may come next in a text."""

    tokens: list[int]
    """The drafted tokens, at least one."""
    source: Source
    match: int
    """The number of last tokens of the text that equal the tokens before the place from which the draft is copied."""


class Terms(NamedTuple):
    """The circumstances of a forward that may have drafts, and its limits."""

    context_tokens: int
    """The number of tokens before the forward."""
    together: int = 1
    """The number of answers in the forward, with or without drafts."""
    limit: StepLimit = UNLIMITED
    slacks: Sequence[float] = ()
    """The slacks of answers in seconds: first of the answers with drafts, then of the others. A missing slack is 0."""


_WORTH = 1.01  # drafts must bring this many times the tokens a second of a plain step: a smaller gain would be noise
_LEAST_PACE = 0.95
"""The least speed of each answer, as a share of its speed without drafts, however much other answers gain."""
FIRST_SLACK_S, _MOST_SLACK_S = 0.1, 1.0
"""An answer's *slack* is the time by which it may be later than at its least speed. Here are the first slack, and the
most slack that an answer can collect by being faster."""


class _Wanted(NamedTuple):
    """A draft of which the search takes the first tokens, or none."""

    draft: Draft
    acceptance: Acceptance
    most: int
    """The most tokens that the search may take."""


class _Search:
    """A search for the lengths of drafts that promise the most tokens a second."""

    def __init__(
        self,
        wanted: Sequence[_Wanted],
        costs: Sequence[float],
        terms: Terms,
        *,
        tokens: float,
        paced: int,
        padded: bool,
    ) -> None:
        """`costs[n]` is the cost of a round with n drafts for each answer. `tokens` is the number of tokens that a
        forward without the `wanted` drafts brings. `paced` answers must keep their least speed: those of `wanted`, then
        others. With `padded`, each draft costs as much as the longest one."""
        self.wanted = wanted
        self.terms = terms
        self.padded = padded
        self._costs = costs
        self._slacks = [*terms.slacks, *[0.0] * (paced - len(terms.slacks))]
        self.best: Sequence[int] = [0] * len(wanted)
        """The number of tokens to take of each draft."""
        # The tokens a second with `best`, the tokens of its forward, and the expected right ones at its last position.
        self._rate, self._tokens, self._right = _WORTH * tokens / costs[0], tokens, float(len(wanted))
        mosts = self._find(tokens)
        self.left = [most - length for most, length in zip(mosts, self.best, strict=True)]
        """The number of tokens that were cut from each draft."""
        if padded:
            self.best = [max(self.best)] * len(wanted)

    def _find(self, tokens: float) -> Sequence[int]:
        """Sets `best`: lengthens all drafts token by token, and notes the lengths with the most tokens a second.
        Returns for each draft the most tokens that the limits allow."""
        costs, together, limit = self._costs, self.terms.together, self.terms.limit
        mosts: Sequence[int] = [each.most for each in self.wanted]
        rates = [each.acceptance.rates() for each in self.wanted]
        right = [1.0] * len(mosts)  # for each draft, the probability that all its tokens so far are right
        each_gets = [1.0] * len(self._slacks)  # the expected tokens of each answer; without a draft it stays at 1
        row_cost = (costs[-1] - costs[0]) / max(1, len(costs) - 1) / together
        lengths, longest, cost = [0] * len(mosts), 0, costs[0]
        while longest < max(mosts):
            right = [
                chance * next(rate) if longest < most else 0.0
                for chance, rate, most in zip(right, rates, mosts, strict=True)
            ]
            if not self.padded:  # a draft grows only if the next row brings more for its cost than the rows so far
                right = [chance if chance * cost > tokens * row_cost else 0.0 for chance in right]
            longest += 1
            more = [length + (chance > 0) for length, chance in zip(lengths, right, strict=True)]
            rows = together * longest if self.padded else rows_of(sum(more), together * longest)
            if more == lengths:
                break
            if rows > together * (len(costs) - 1):
                return lengths
            cost = cost_of(costs, 1 + rows / together)
            if cost > limit.seconds and rows > limit.drafts:
                return lengths
            lengths = more
            tokens += sum(right)
            for place, chance in enumerate(right):
                each_gets[place] += chance
            if tokens / cost > self._rate and self._keeps_pace(each_gets, cost):
                self.best, self._rate, self._tokens, self._right = lengths, tokens / cost, tokens, sum(right)
        return mosts

    def _keeps_pace(self, each_gets: Sequence[float], cost: float) -> bool:
        """Returns True if each answer keeps its least speed, or has enough slack, in a round of this cost. `each_gets`
        has the expected number of tokens that the round brings to each answer."""
        pairs = zip(each_gets, self._slacks, strict=True)
        return all(gets * self._costs[0] + slack >= cost * _LEAST_PACE for gets, slack in pairs)

    def is_hopeful(self, place: int) -> bool:
        """Returns True if one more token of the draft at this place would pay if it were right. Always True for known
        text: looking it up costs nothing, and rounds may become cheaper."""
        if self.wanted[place].draft.source != "model":
            return True
        return (self._tokens + self._right) / self._costs[self.best[place] + 1] > self._rate


class DraftPolicy:
    """Chooses the lengths of drafts, from 0 up, that promise the most tokens a second, and learns from outcomes.

    All requests of the process share one policy. Drafts of answers that are computed together get one length, since
    shorter ones would be padded; if the forward skips padding, each gets its own length. Owner: the engine thread."""

    def __init__(
        self,
        most: int = DEFAULT_DRAFT_TOKENS,
        first_costs: Sequence[float] = CPU_COSTS,
        *,
        at_once: bool = False,
        skips_padding: bool = False,
    ) -> None:
        """`most` is the most drafts of one answer in a round. `first_costs` has the assumed relative costs of rounds of
        1 to `MOST_ROWS` rows in all, until times are measured. `at_once` is True if the model that drafts makes all
        tokens in one forward, `skips_padding` if the forward of the answering model skips padding."""
        assert len(first_costs) >= MOST_ROWS > most
        self.most = most
        self._at_once = at_once
        self.skips_padding = skips_padding
        self._first_costs = first_costs
        self._costs: dict[int, RoundCosts] = {}  # number of answers -> costs of rounds over them
        self._draft_costs: dict[int, DraftCost] = {}  # number of answers -> cost of drafting for them
        self._undecided = 0  # the number of choices that have cut a draft
        pauses = dict.fromkeys(SOURCES, LOOKUP_PAUSE) | {"model": BLOCK_PAUSE if at_once else MODEL_PAUSE}
        self._acceptances = {
            (source, size): Acceptance(size, most, pause) for source, pause in pauses.items() for size in range(5)
        }

    def longest(self, together: int) -> int:
        """Returns the most drafts of one answer in a round over `together` answers."""
        of_all = self._longest_of_all(together)
        return self.most if self.skips_padding and of_all > 0 else of_all

    def _longest_of_all(self, together: int) -> int:
        """Returns the most drafts of each answer in a round over `together` answers that all have the same number."""
        return self.most if together == 1 else min(self.most, MOST_ROWS // together - 1)

    def lengths(self, drafts: Sequence[Draft], terms: Terms) -> Sequence[int]:
        """Returns the number of tokens to take of each draft. The forward may have more answers than drafts. Call it
        once for each forward: now and then the result is a probe.

        Until enough rounds are counted, takes no more tokens of a draft than matched."""
        together = terms.together
        costs, padded = self._costs_of(together).curve(terms.context_tokens), together == 1 or not self.skips_padding
        wanted = [self._wanted(draft, len(draft.tokens)) for draft in drafts]
        search = _Search(wanted, costs, self._in_costs(terms), tokens=together, paced=together, padded=padded)
        return self._probed(search)

    def model_length(self, mosts: Sequence[int], terms: Terms, beside: Sequence[Draft] = ()) -> int:
        """Returns the number of tokens that a model should draft for each answer without a draft. `mosts` has the most
        tokens of each of these answers.

        Decides as `lengths` does, and adds the time of drafting. `beside` has the drafts of other answers in the
        forward: the number is at most the length of the longest of them."""
        draft, together = Draft([], "model", MODEL_MATCH), terms.together
        if self._longest_of_all(together) < 1 or self._acceptance(draft).rests():
            return 0
        known = self._costs_of(together)
        rounds = known.curve(terms.context_tokens)
        drafting = self._draft_costs.get(together) if known.known else None
        drafts = (drafting or DraftCost(self.most)).curve(rounds[0])
        longest = min(len(rounds) - 1, max((len(each.tokens) for each in beside), default=len(rounds) - 1))
        costs = [rounds[longest if beside else length] + drafts[self._units(length)] for length in range(longest + 1)]
        wanted = [self._wanted(draft, most) for most in mosts]
        tokens, paced = together + sum(map(self._expected, beside)), together - len(beside)
        search = _Search(wanted, costs, self._in_costs(terms), tokens=tokens, paced=paced, padded=True)
        return self._probed(search)[0]

    def _in_costs(self, terms: Terms) -> Terms:
        """Returns the terms; while costs are not in seconds, without the limit and the slacks, which are."""
        return terms if self._costs_of(terms.together).known else terms._replace(limit=UNLIMITED, slacks=())

    def _wanted(self, draft: Draft, count: int) -> "_Wanted":
        acceptance = self._acceptance(draft)
        return _Wanted(draft, acceptance, min(count, self.most if acceptance.trusted else min(draft.match, self.most)))

    def _expected(self, draft: Draft) -> float:
        """Returns the expected number of right tokens in a draft."""
        expected, right = 0.0, 1.0
        for rate, _ in zip(self._acceptance(draft).rates(), draft.tokens, strict=False):
            right *= rate
            expected += right
        return expected

    def _probed(self, search: "_Search") -> Sequence[int]:
        """Returns the best lengths or, now and then, a probe: then one draft that was cut gets one more token, and if
        drafts are padded, all do."""
        left, best, padded = search.left, search.best, search.padded
        if max(left) <= 0:
            return best
        self._undecided += 1
        if padded and self._undecided % search.terms.together:
            return best  # a probe adds a row to all answers, so probes are rarer with more answers
        probed = left.index(max(left))
        if not search.wanted[probed].acceptance.probes(best[probed], hopeful=search.is_hopeful(probed)):
            return best
        return [length + (padded or place == probed) for place, length in enumerate(best)]

    def slacks_after(self, terms: Terms, tokens: Sequence[int], rows: float, plain_steps: int = 0) -> Sequence[float]:
        """Returns the slacks of answers after `plain_steps` steps without drafts, and one step of `rows` rows for each
        answer. `tokens` has the number of tokens that this last step brought to each answer."""
        known = self._costs_of(terms.together)
        if not known.known or rows > self._longest_of_all(terms.together) + 1:
            return terms.slacks
        plain_s = known.plain_s(terms.context_tokens)
        before_s = plain_steps * (1 - _LEAST_PACE) * plain_s
        least_s = _LEAST_PACE * (plain_s if rows == 1 else cost_of(known.curve(terms.context_tokens), rows))
        return [
            min(_MOST_SLACK_S, slack + before_s + brought * plain_s - least_s)
            for slack, brought in zip(terms.slacks, tokens, strict=True)
        ]

    def _costs_of(self, together: int) -> RoundCosts:
        """Returns the costs of rounds over this many answers, by the rows of each answer."""
        if together not in self._costs:
            rows = [together * (1 + length) for length in range(max(0, self._longest_of_all(together)) + 1)]
            costs = [self._first_costs[row - 1] for row in rows]
            self._costs[together] = RoundCosts(costs)
        return self._costs[together]

    def record_outcome(self, draft: Draft, taken: int, accepted: int) -> None:
        """Records that a round tried the first `taken` tokens of a draft, of which the first `accepted` were right."""
        if taken:
            self._acceptance(draft).record(taken, accepted)

    def record_time(self, rows: float, seconds: float, context_tokens: int, together: int = 1) -> None:
        """Records the time of a round over `together` answers with `rows` rows each. In a plain step `rows` is 1."""
        self._costs_of(together).record(rows, seconds, context_tokens)

    def record_drafting(self, tokens: int, seconds: float, together: int = 1) -> None:
        """Records the time in which a model drafted `tokens` tokens, at least one, for each of `together` answers."""
        self._draft_costs.setdefault(together, DraftCost(self.most)).record(self._units(tokens), seconds)

    def _units(self, tokens: int) -> int:
        """Returns the number of forwards in which a model makes `tokens` drafts."""
        return min(tokens, 1) if self._at_once else tokens

    def _acceptance(self, draft: Draft) -> Acceptance:
        return self._acceptances[draft.source, match_class(draft.match)]
