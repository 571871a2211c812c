"""Averages of measured times: of rounds, by their number of rows; of drafting by a model, by its tokens. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

MOST_ROWS = 64
"""The most rows of a round over several answers."""
_LEAST_WEIGHT = 0.05  # the weight of the latest round in the average of its length; the first rounds weigh more
_COMMON_WEIGHT = 0.1  # the latest round's weight in the averages of all lengths: a slower machine slows all of them
_SURE = 4  # a length changes the averages of other lengths after more rounds than this
_MOST_CHANGE = 0.5  # the most relative change of an average by one round, before it is multiplied by a weight
_PADDING = 0.1  # the cost of a row of skipped padding, as a share of the cost of another row
_FIRST_PATIENCE, _MOST_PATIENCE = 32, 1024  # the first and the most plain steps until times of rounds are forgotten
_STREAK = 16  # if rounds outnumber plain steps by this many, the patience becomes the first one again
_FIRST_SHARE = 0.2  # the assumed time in which a model drafts one token, as a share of a plain step
_EACH = 0.5  # the assumed time of each further token, as a share of the first token's


class DraftCost:
    """The average time in which a model drafts 1 token, 2 tokens, ... Owner: the engine thread."""

    def __init__(self, most: int) -> None:
        """`most` is the length of the longest draft."""
        self._most = most
        self._known: _Context | None = None
        self._began = False

    def record(self, tokens: int, seconds: float) -> None:
        """Records the time in which the model made `tokens` drafts, at least one. Ignores the first recorded time: it
        may be several times as long as any later one."""
        if not self._began:
            self._began = True
            return
        if self._known is None:
            self._known = _Context([1 + _EACH * index for index in range(self._most)])
        self._known.record(tokens, seconds)

    def curve(self, step_s: float) -> Sequence[float]:
        """Returns the seconds for 0 tokens, 1 token, 2 tokens, ... While nothing is recorded, these are assumed shares
        of `step_s`, the seconds of a plain step."""
        if self._known is None:
            return [step_s * _FIRST_SHARE * tokens for tokens in range(self._most + 1)]
        return [0.0, *self._known.curve()]


class RoundCosts:
    """The average time of rounds for each number of rows and each power of two of the context's length.

    The cost of a number of rows that never ran is interpolated between measured ones, in the shape of the curve of the
    nearest known context, or of the first curve. After many plain steps without rounds, all averages but those of plain
    steps are forgotten: else a few rounds that were slow by accident would prevent all later rounds. The number of
    plain steps until then doubles each time. Owner: the engine thread."""

    def __init__(self, first: Sequence[float]) -> None:
        """`first` has the relative costs of 1 row, 2 rows, ..., which count until costs are measured."""
        self._first = first
        self._contexts: dict[int, _Context] = {}
        self._plain = 0  # the number of plain steps minus the number of rounds, at least -_STREAK
        self._patience = _FIRST_PATIENCE

    def record(self, rows: float, seconds: float, context_tokens: int) -> None:
        """Records the time of a round after `context_tokens` tokens. `rows` is the mean number of rows of an answer.
        Ignores a round of more rows than `first` has costs: something other than drafts has lengthened it."""
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
        """True if a time has been recorded. Then costs are seconds."""
        return bool(self._contexts)

    def curve(self, context_tokens: int) -> Sequence[float]:
        """Returns the costs of 1 row, 2 rows, ..., in seconds if they are `known`, else in plain steps."""
        return self._nearest(context_tokens).curve() if self._contexts else self._first

    def plain_s(self, context_tokens: int) -> float:
        """Returns only the first value of `curve`: the seconds of a plain step. Costs must be `known`."""
        return self._nearest(context_tokens).plain_s()

    def _nearest(self, context_tokens: int) -> "_Context":
        key = context_tokens.bit_length()
        if key in self._contexts:
            return self._contexts[key]
        return self._contexts[min(self._contexts, key=lambda other: abs(other - key))]


class _Context:
    """The costs of rounds for contexts of about one length, or of drafting."""

    def __init__(self, shape: Sequence[float]) -> None:
        """`shape` has the relative costs of 1 row, 2 rows, ...; it gives the proportions of costs that are unknown."""
        self._shape = shape
        self._known: dict[int, float] = {}
        self._counts: dict[int, float] = {}
        self._curve: Sequence[float] = ()

    def record(self, rows: float, seconds: float) -> None:
        """Records the time of a round. A fractional number of rows counts for the number above it, by the fraction."""
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
        """Forgets all costs but the plain step's, and takes a new `shape`."""
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
    """Returns the number of rows without padding that cost as much as `padded` rows, of which only `asked` are asked
    for and the others are skipped padding."""
    return asked + _PADDING * (padded - asked)


def cost_of(curve: Sequence[float], rows: float) -> float:
    """Returns the cost of a fractional number of rows, at least 1. `curve` has the costs of 1 row, 2 rows, ..."""
    below = int(rows)
    if below == rows:
        return curve[below - 1]
    return curve[below - 1] + (rows - below) * (curve[below] - curve[below - 1])


def _between(known: dict[int, float], most: int) -> list[float]:
    """Returns the values for 1 to `most` rows: known values, straight lines between them, and the first and the last
    known value outside of them."""
    rows = sorted(known)
    values = [known[rows[0]]] * rows[0]
    for left, right in pairwise(rows):
        slope = (known[right] - known[left]) / (right - left)
        values += [known[left] + slope * (row - left) for row in range(left + 1, right + 1)]
    values += [known[rows[-1]]] * (most - len(values))
    return values[:most]


CPU_COSTS: Sequence[float] = _between({1: 1.0, 2: 1.15, 4: 1.5, 8: 2.4, 16: 3.5, 32: 5.9, 64: 10.0}, MOST_ROWS)
GPU_COSTS: Sequence[float] = [1 + 0.12 * index for index in range(MOST_ROWS)]
"""The assumed costs of rounds of 1 to `MOST_ROWS` rows on a CPU and on a GPU, in plain steps, until times are known."""
