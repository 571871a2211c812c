"""Decides from numbers alone how many tokens of a draft are worth their rows; knows no model and no clock."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Literal, NamedTuple, get_args

from runner.engine.policy import UNLIMITED, StepLimit
from runner.settings import DEFAULT_DRAFT_TOKENS

# --- How often drafts like this one were right, token by token.

_FIRST = (0.3, 0.5, 0.7, 0.8, 0.9)
"""What is expected of the first token at first, for matches of 1-2, 3-4, 5-8, 9-16 and more tokens."""
_FIRST_WEIGHT = 2.0  # of what is expected, in rounds; it fades as they do
_KEPT = 1 - 1 / 24  # of all counts, by each round
_ENOUGH = 8  # rounds, until the counts are trusted beyond the length of the match
_FIRST_PAUSE = 4  # drafts between two probes
LOOKUP_PAUSE, BLOCK_PAUSE, MODEL_PAUSE = 64, 64, 256
"""The most drafts between two probes in vain. One of known text costs a row more, a sixth of a step; a block of drafts
about half a step. A model that drafts token by token reads the end of the text for it, drafts, and nothing is
dispatched ahead: up to two steps."""


def match_class(match: int) -> int:
    """Returns 0 to 4 for matches of 1-2, 3-4, 5-8, 9-16 and more tokens."""
    return min(max(match - 1, 1).bit_length() - 1, len(_FIRST) - 1)


class Acceptance:
    """The counts of drafts from one source, with matches of one class. Owner: the engine thread.

    A position counts only if all before it were right. Counts fade with each round that drafts, so a position that was
    not tried for a while is expected to be like the one before it, and so is tried again. Where nothing is drafted any
    more, or less than could be, a probe goes one token further now and then, ever more rarely while it is in vain.
    """

    def __init__(self, match_class: int, most: int, most_pause: int = LOOKUP_PAUSE) -> None:
        """`most` is the length of the longest draft, `most_pause` the most drafts between two probes."""
        self._most_pause = most_pause
        self._tried = [_FIRST_WEIGHT] + [0.0] * (most - 1)
        self._right = [_FIRST_WEIGHT * _FIRST[match_class]] + [0.0] * (most - 1)
        self._pause = _FIRST_PAUSE
        self._waited = 0
        self._probe = 0
        self._idle = False  # nothing was drafted the last time

    @property
    def trusted(self) -> bool:
        """True if there are counts enough."""
        return self._tried[0] >= _ENOUGH

    def rates(self) -> Iterator[float]:
        """Iterates over how likely each token is right if those before it are."""
        rate = self._right[0] / self._tried[0]
        yield rate
        for tried, right in zip(self._tried[1:], self._right[1:], strict=True):
            rate = (right + rate * _FIRST_WEIGHT) / (tried + _FIRST_WEIGHT)
            yield rate

    def rests(self) -> bool:
        """Returns True if nothing was drafted the last time, and no probe is due. That counts as another draft that was
        cut to nothing: there is no need to find that out token by token."""
        if not self._idle or self._waited + 1 >= self._pause:
            return False
        self._waited += 1
        return True

    def probes(self, length: int, *, hopeful: bool = True) -> bool:
        """Returns True if a draft that would be cut to `length` tokens should have one more, to see what comes of it.
        With `hopeful=False`, if it would not pay even if it were right, the probe shows its cost only."""
        self._waited += 1
        self._idle = False
        if self._waited < self._pause:
            self._idle = not length
            return False
        self._waited = 0
        self._probe = length + 1 if hopeful else 0
        self._pause = min(2 * self._pause, self._most_pause)
        return True

    def record(self, taken: int, accepted: int) -> None:
        """Records that of `taken` tokens, at least one, the first `accepted` were right."""
        if accepted >= self._probe > 0:
            self._pause = _FIRST_PAUSE
        self._probe = 0
        for index, tried in enumerate(self._tried):
            seen = index < taken and index <= accepted
            self._tried[index] = tried * _KEPT + seen
            self._right[index] = self._right[index] * _KEPT + (seen and index < accepted)


# --- How long rounds take by their rows, measured while they happen.

_LEAST_WEIGHT = 0.05  # of the latest round in an average; the first ones weigh more
_COMMON_WEIGHT = 0.1  # of the latest round in all averages: a machine that becomes slower does so for all lengths
_SURE = 4  # rounds of one length, until it takes the others along
_MOST_CHANGE = 0.5  # of an average by one round, times these weights
_PADDING = 0.1  # what a row of skipped padding costs, as a share of a row that is asked for
_FIRST_PATIENCE, _MOST_PATIENCE = 32, 1024  # plain steps until what is known of rounds is forgotten
_STREAK = 16  # rounds that pay: those that stop to do so are tried again soon
_FIRST_SHARE = 0.2  # of a plain step: what a model is taken to need for a token, as long as nothing is known
_EACH = 0.5  # of the first token: what each further one is taken to need, as long as none was drafted


def cpu_costs(most: int) -> list[float]:
    """Returns what rounds of 1 to `most` rows cost on a CPU, in plain steps, as long as nothing is known."""
    known = {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.4, 16: 3.5, 32: 5.9, 64: 10.0}
    return _between(known, most)


def gpu_costs(most: int) -> list[float]:
    """Returns what rounds of 1 to `most` rows cost on a GPU, in plain steps, as long as nothing is known."""
    return [1 + 0.12 * index for index in range(most)]


class DraftCost:
    """The average time in which a model drafts 1 token, 2 tokens, and so on, measured while it happens. Owner: the
    engine thread."""

    def __init__(self, most: int) -> None:
        """`most` is the length of the longest draft."""
        self._most = most
        self._known: _Context | None = None
        self._began = False

    def record(self, tokens: int, seconds: float) -> None:
        """Records how long `tokens` tokens took, at least one. The first time counts for nothing: it may take several
        times as long as any other."""
        if not self._began:
            self._began = True
            return
        if self._known is None:
            self._known = _Context([1 + _EACH * index for index in range(self._most)])
        self._known.record(tokens, seconds)

    def curve(self, step_s: float) -> Sequence[float]:
        """Returns the seconds of no token, one, two, and so on; as long as nothing is known shares of a plain step,
        which takes `step_s`."""
        if self._known is None:
            return [step_s * _FIRST_SHARE * tokens for tokens in range(self._most + 1)]
        return [0.0, *self._known.curve()]


class RoundCosts:
    """The average time of rounds for each number of rows and each power of two of the context.

    Numbers of rows that never ran are taken to lie between their neighbours, in proportion to the curve of the nearest
    context that is known, or to the first one. Once there was no round for a while, all but plain steps is forgotten,
    ever more rarely: a few rounds that took long for another reason would keep all others away. Owner: the engine
    thread.
    """

    def __init__(self, first: Sequence[float]) -> None:
        """`first` has the relative costs of 1 row, 2 rows, and so on, as long as nothing is known."""
        self._first = first
        self._contexts: dict[int, _Context] = {}
        self._plain = 0  # plain steps, less the rounds among them
        self._patience = _FIRST_PATIENCE

    def record(self, rows: float, seconds: float, context_tokens: int) -> None:
        """Records how long a round of `rows` rows, a mean, took after `context_tokens` tokens. Others than drafts may
        lengthen it: nothing is learned from one of more rows than there are costs."""
        if rows > len(self._first):
            return
        key = context_tokens.bit_length()
        if key not in self._contexts:
            self._contexts[key] = _Context(self.curve(context_tokens))
        self._contexts[key].record(rows, seconds)
        self._plain = max(-_STREAK, self._plain + (1 if rows == 1 else -1))
        if self._plain == -_STREAK:
            self._patience = _FIRST_PATIENCE
        elif self._plain == self._patience:
            self._plain, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)
            for context in self._contexts.values():
                context.forget(self._first)

    @property
    def known(self) -> bool:
        """True if costs are seconds."""
        return bool(self._contexts)

    def curve(self, context_tokens: int) -> Sequence[float]:
        """Returns the costs of 1 row, 2 rows, and so on: seconds, or plain steps as long as nothing is known."""
        return self._nearest(context_tokens).curve() if self._contexts else self._first

    def plain_s(self, context_tokens: int) -> float:
        """Returns the seconds of a plain step, once costs are known: what `curve` has first, at less cost."""
        return self._nearest(context_tokens).plain_s()

    def _nearest(self, context_tokens: int) -> "_Context":
        key = context_tokens.bit_length()
        if key in self._contexts:
            return self._contexts[key]
        return self._contexts[min(self._contexts, key=lambda other: abs(other - key))]


class _Context:
    """The costs at one power of two of the context."""

    def __init__(self, shape: Sequence[float]) -> None:
        """`shape` has relative costs that hold as far as nothing else is known."""
        self._shape = shape
        self._known: dict[int, float] = {}
        self._counts: dict[int, float] = {}
        self._curve: Sequence[float] = ()

    def record(self, rows: float, seconds: float) -> None:
        """Records how long a round took. A mean number of rows is a measure of the next whole one, as far as it is from
        the one below."""
        above = ceil(rows)
        if rows == 1 and 1 in self._known:  # the usual case, and the cheapest
            expected = average = self._known[1]
        else:
            curve = self.curve()
            expected, average = cost_of(curve, rows), curve[above - 1]
        if not self._known:
            seconds *= average / expected
        else:
            share = 1 + rows - above
            self._counts[above] = count = self._counts.get(above, 0) + share
            change = share * max(-_MOST_CHANGE, min(_MOST_CHANGE, (seconds - expected) / average))
            seconds = average * (1 + change * max(_LEAST_WEIGHT, 1 / (count + 1)))
            if count > _SURE:
                common = 1 + change * _COMMON_WEIGHT
                self._known = {other: known * common for other, known in self._known.items()}
                seconds *= common
        self._known[above] = seconds
        self._curve = ()

    def forget(self, shape: Sequence[float]) -> None:
        """Forgets all but plain steps."""
        self._known, self._counts = {1: self.plain_s()}, {1: self._counts.get(1, 0)}
        self._shape, self._curve = shape, ()

    def plain_s(self) -> float:
        return self._known[1] if 1 in self._known else self.curve()[0]

    def curve(self) -> Sequence[float]:
        if not self._known:
            return self._shape
        if not self._curve:
            known = {rows: seconds / self._shape[rows - 1] for rows, seconds in self._known.items()}
            factors = _between(known, len(self._shape))
            costs = [factor * cost for factor, cost in zip(factors, self._shape, strict=True)]
            self._curve = [max(costs[0], cost) for cost in costs]
        return self._curve


def rows_of(asked: float, padded: float) -> float:
    """Returns the number of rows without padding that cost as much as `padded` rows of which `asked` are computed."""
    return asked + _PADDING * (padded - asked)


def cost_of(curve: Sequence[float], rows: float) -> float:
    """Returns the cost of a mean number of rows, from 1 on, on straight lines between those of 1 row, 2 rows, and so
    on."""
    below = int(rows)
    if below == rows:
        return curve[below - 1]
    return curve[below - 1] + (rows - below) * (curve[below] - curve[below - 1])


def _between(known: dict[int, float], most: int) -> list[float]:
    """Returns values for 1 to `most` rows: known ones, on straight lines between them, and level beyond the last."""
    rows = sorted(known)
    values = [known[rows[0]]] * rows[0]
    for left, right in pairwise(rows):
        slope = (known[right] - known[left]) / (right - left)
        values += [known[left] + slope * (row - left) for row in range(left + 1, right + 1)]
    values += [known[rows[-1]]] * (most - len(values))
    return values[:most]


# --- What a drafter proposes.

Source = Literal["own", "earlier", "path", "model"]
"""Where a draft is from: the request's own text, the answer of an earlier request, a path of the prefix cache that
begins with all of the request's text, or a model that drafts."""
SOURCES: tuple[Source, ...] = get_args(Source)
MODEL_MATCH = 5
"""The match of a model's drafts, which have none: until there are counts, they are trusted as if
this many tokens had matched."""


class Draft(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    """At least one."""
    source: Source
    match: int
    """How many tokens right before the draft are the same where it is from."""


class Terms(NamedTuple):
    """What the drafts of a forward have to keep to."""

    context_tokens: int
    """The tokens before it."""
    together: int = 1
    """The number of its answers."""
    limit: StepLimit = UNLIMITED
    slacks: Sequence[float] = ()
    """The slacks of all answers that have to keep their pace, the drafted ones first; missing ones are 0."""


_WORTH = 1.01  # times the tokens a second of a plain step: less would be noise
_LEAST_PACE = 0.95
"""The share of its tokens a second without drafts that each answer keeps, however much the others gain."""
FIRST_SLACK_S, _MOST_SLACK_S = 0.1, 1.0
"""The time by which an answer may fall behind that pace at first, and at most, after drafts have brought it ahead."""
_MOST_TOGETHER = 64  # tokens of a forward over several answers


class _Wanted(NamedTuple):
    """A draft of which some tokens may be taken."""

    draft: Draft
    acceptance: Acceptance
    most: int
    """The most tokens to take."""


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
        """`costs` are those of no token, one, and so on for each answer. A forward brings so many `tokens` without the
        drafts. `paced` answers must keep their pace, the drafted ones first. `padded` drafts cost as much as the
        longest one."""
        self.wanted = wanted
        self.terms = terms
        self.padded = padded
        self._costs = costs
        self._slacks = [*terms.slacks, *[0.0] * (paced - len(terms.slacks))]
        self.best: Sequence[int] = [0] * len(wanted)
        """The lengths."""
        self._rate, self._tokens, self._right = _WORTH * tokens / costs[0], tokens, float(len(wanted))  # of the best
        mosts = self._find(tokens)
        self.left = [most - length for most, length in zip(mosts, self.best, strict=True)]
        """The tokens of each draft that were cut."""
        if padded:
            self.best = [max(self.best)] * len(wanted)

    def _find(self, tokens: float) -> Sequence[int]:
        """Lengthens all drafts token by token. Returns the most tokens of each that could be taken."""
        costs, together, limit = self._costs, self.terms.together, self.terms.limit
        mosts: Sequence[int] = [each.most for each in self.wanted]
        rates = [each.acceptance.rates() for each in self.wanted]
        right = [1.0] * len(mosts)  # how likely it is that all tokens so far are
        each_gets = [1.0] * len(self._slacks)  # tokens; one without a draft gets no more
        row_cost = (costs[-1] - costs[0]) / max(1, len(costs) - 1) / together
        lengths, longest, cost = [0] * len(mosts), 0, costs[0]
        while longest < max(mosts):
            right = [
                chance * next(rate) if longest < most else 0.0
                for chance, rate, most in zip(right, rates, mosts, strict=True)
            ]
            if not self.padded:  # a row has to bring more for its cost than those so far
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
        """Returns True if no answer, which gets these tokens at this cost, falls too far behind."""
        pairs = zip(each_gets, self._slacks, strict=True)
        return all(gets * self._costs[0] + slack >= cost * _LEAST_PACE for gets, slack in pairs)

    def is_hopeful(self, place: int) -> bool:
        """Returns True if one token more of a draft would pay if it were right. Known text costs nothing to look up,
        and a round may become cheaper; a model is asked in vain."""
        if self.wanted[place].draft.source != "model":
            return True
        return (self._tokens + self._right) / self._costs[self.best[place] + 1] > self._rate


class DraftPolicy:
    """Chooses the lengths that promise the most tokens a second, 0 included, and learns from the outcomes.

    One for all requests of the process. Answers that are computed together are drafted to one length, as the shorter
    ones are padded; or each to its own, if the forward skips padding. Owner: the engine thread.
    """

    def __init__(
        self, most: int, first_costs: Sequence[float], *, at_once: bool = False, skips_padding: bool = False
    ) -> None:
        """`most` is the most drafted tokens a round; `first_costs` has the relative costs of rounds of 1 row, 2 rows,
        and so on, of all answers together, as long as nothing is known: as many as a forward may have. `at_once` is
        True if the model that drafts takes as long for many tokens as for one, `skips_padding` if padding costs nothing
        in the forward of the answers' model.
        """
        assert len(first_costs) >= _MOST_TOGETHER > most
        self.most = most
        self._at_once = at_once
        self.skips_padding = skips_padding
        self._first_costs = first_costs
        self._costs: dict[int, RoundCosts] = {}  # by the number of answers
        self._draft_costs: dict[int, DraftCost] = {}  # also
        self._undecided = 0  # drafts that were cut
        pauses = dict.fromkeys(SOURCES, LOOKUP_PAUSE) | {"model": BLOCK_PAUSE if at_once else MODEL_PAUSE}
        self._acceptances = {
            (source, size): Acceptance(size, most, pause) for source, pause in pauses.items() for size in range(5)
        }

    @classmethod
    def for_cpu(
        cls, most: int = DEFAULT_DRAFT_TOKENS, *, at_once: bool = False, skips_padding: bool = False
    ) -> "DraftPolicy":
        """Returns a policy that begins with the costs of CPUs."""
        return cls(most, cpu_costs(_MOST_TOGETHER), at_once=at_once, skips_padding=skips_padding)

    @classmethod
    def for_gpu(cls, most: int = DEFAULT_DRAFT_TOKENS, *, at_once: bool = False) -> "DraftPolicy":
        """Returns a policy that begins with the costs of GPUs."""
        return cls(most, gpu_costs(_MOST_TOGETHER), at_once=at_once)

    def longest(self, together: int) -> int:
        """Returns the most tokens that one of several answers may draft in one round."""
        of_all = self._longest_of_all(together)
        return self.most if self.skips_padding and of_all > 0 else of_all

    def _longest_of_all(self, together: int) -> int:
        """Returns the most tokens that each of them may draft in one round, if all draft as many."""
        return self.most if together == 1 else min(self.most, _MOST_TOGETHER // together - 1)

    def lengths(self, drafts: Sequence[Draft], terms: Terms) -> Sequence[int]:
        """Returns how many tokens of each of these drafts to take, in a forward that may have more answers. Ask once
        for each: now and then the result is a probe.

        At first no more are taken than matched.
        """
        together = terms.together
        costs, padded = self._costs_of(together).curve(terms.context_tokens), together == 1 or not self.skips_padding
        wanted = [self._wanted(draft, len(draft.tokens)) for draft in drafts]
        search = _Search(wanted, costs, self._in_costs(terms), tokens=together, paced=together, padded=padded)
        return self._probed(search)

    def model_length(self, mosts: Sequence[int], terms: Terms, beside: Sequence[Draft] = ()) -> int:
        """Returns how many tokens a model should draft for each of some answers, which may have at most so many: as
        `lengths`, plus the time of drafting itself. If other answers of the forward try drafts `beside` them, no more
        than these have, as they would be padded."""
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
        """Returns terms without limit and slacks, which are seconds, as long as costs are none."""
        return terms if self._costs_of(terms.together).known else terms._replace(limit=UNLIMITED, slacks=())

    def _wanted(self, draft: Draft, count: int) -> "_Wanted":
        acceptance = self._acceptance(draft)
        return _Wanted(draft, acceptance, min(count, self.most if acceptance.trusted else min(draft.match, self.most)))

    def _expected(self, draft: Draft) -> float:
        """Returns how many tokens of a draft are likely to be right."""
        expected, right = 0.0, 1.0
        for rate, _ in zip(self._acceptance(draft).rates(), draft.tokens, strict=False):
            right *= rate
            expected += right
        return expected

    def _probed(self, search: "_Search") -> Sequence[int]:
        """Returns the best lengths or, now and then, a probe: one token more of a draft that was cut."""
        left, best, padded = search.left, search.best, search.padded
        if max(left) <= 0:
            return best
        self._undecided += 1
        if padded and self._undecided % search.terms.together:
            return best  # a probe costs a row of each answer: it is as rare as if each were alone
        probed = left.index(max(left))
        if not search.wanted[probed].acceptance.probes(best[probed], hopeful=search.is_hopeful(probed)):
            return best
        return [length + (padded or place == probed) for place, length in enumerate(best)]

    def slacks_after(self, terms: Terms, tokens: Sequence[int], rows: float, plain_steps: int = 0) -> Sequence[float]:
        """Returns the slacks of answers after `plain_steps` and a round of `rows` rows of each answer, or another plain
        step, of one row. The last one brought each answer these `tokens`."""
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
        """Returns what is known of forwards over as many answers."""
        if together not in self._costs:
            rows = [together * (1 + length) for length in range(max(0, self._longest_of_all(together)) + 1)]
            costs = [self._first_costs[row - 1] for row in rows]
            self._costs[together] = RoundCosts(costs)
        return self._costs[together]

    def record_outcome(self, draft: Draft, taken: int, accepted: int) -> None:
        """Records that a round tried the first `taken` tokens of a draft, and the first `accepted` were right."""
        if taken:
            self._acceptance(draft).record(taken, accepted)

    def record_time(self, rows: float, seconds: float, context_tokens: int, together: int = 1) -> None:
        """Records how long a round over so many answers took, of one row each if it was a plain step."""
        self._costs_of(together).record(rows, seconds, context_tokens)

    def record_drafting(self, tokens: int, seconds: float, together: int = 1) -> None:
        """Records how long a model took to draft `tokens` tokens, at least one, for each of so many answers."""
        self._draft_costs.setdefault(together, DraftCost(self.most)).record(self._units(tokens), seconds)

    def _units(self, tokens: int) -> int:
        """Returns the number of forwards that a model needs for `tokens` drafts."""
        return min(tokens, 1) if self._at_once else tokens

    def _acceptance(self, draft: Draft) -> Acceptance:
        return self._acceptances[draft.source, match_class(draft.match)]
