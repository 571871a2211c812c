"""How long a round of as many rows takes, learned while it happens."""

from collections.abc import Sequence
from itertools import pairwise

_LEAST_WEIGHT = 0.1  # of the latest round in an average; the first ones weigh more
_MOST_CHANGE = 0.5  # times that weight, of an average by one round
_FIRST_SHARE = 0.2  # of a plain step: what a model is taken to need for a token, as long as nothing is known
_EACH = 0.5  # of the first token: what each further one is taken to need, as long as none was drafted


def cpu_costs(most: int) -> list[float]:
    """Returns what rounds of 1 to `most` rows cost on a CPU, in plain steps, as long as nothing is known."""
    known = {1: 1.0, 2: 1.15, 4: 1.4, 5: 1.5, 8: 2.0, 9: 2.9, 16: 3.6}
    return _between(known, most)


def gpu_costs(most: int) -> list[float]:
    """Returns what rounds of 1 to `most` rows cost on a GPU, in plain steps, as long as nothing is known."""
    return [1 + 0.12 * index for index in range(most)]


class DraftCost:
    """The average time in which a model drafts so many tokens, learned while it happens. Owner: the engine thread."""

    def __init__(self, most: int) -> None:
        """`most` is the length of the longest draft."""
        self._most = most
        self._known: _Context | None = None
        self._began = False

    def took(self, tokens: int, seconds: float) -> None:
        """Learns how long so many tokens took, at least one. The first time counts for nothing: it may take several
        times as long as any other."""
        if not self._began:
            self._began = True
            return
        if self._known is None:
            self._known = _Context([1 + _EACH * index for index in range(self._most)])
        self._known.took(tokens, seconds)

    def curve(self, step_s: float) -> Sequence[float]:
        """Returns the seconds of no token, one, two, and so on; as long as nothing is known shares of a plain step,
        which takes `step_s`."""
        if self._known is None:
            return [step_s * _FIRST_SHARE * tokens for tokens in range(self._most + 1)]
        return [0.0, *self._known.curve()]


class RoundCosts:
    """The average time of rounds for each number of rows and each power of two of the context.

    Numbers of rows that never ran are taken to lie between their neighbours, in proportion to the curve of the nearest
    context that is known, or to the first one. Owner: the engine thread.
    """

    def __init__(self, first: Sequence[float]) -> None:
        """`first` has the relative costs of 1 row, 2 rows, and so on, as long as nothing is known."""
        self._first = first
        self._contexts: dict[int, _Context] = {}

    def took(self, rows: int, seconds: float, context_tokens: int) -> None:
        """Learns how long a round of so many rows took, behind so many tokens."""
        if not 0 < rows <= len(self._first):
            return
        key = context_tokens.bit_length()
        if key not in self._contexts:
            self._contexts[key] = _Context(self.curve(context_tokens))
        self._contexts[key].took(rows, seconds)

    @property
    def known(self) -> bool:
        """True if costs are seconds."""
        return bool(self._contexts)

    def curve(self, context_tokens: int) -> Sequence[float]:
        """Returns the costs of 1 row, 2 rows, and so on: seconds, or plain steps as long as nothing is known."""
        if not self._contexts:
            return self._first
        key = context_tokens.bit_length()
        return self._contexts[min(self._contexts, key=lambda other: abs(other - key))].curve()


class _Context:
    """The costs at one power of two of the context."""

    def __init__(self, shape: Sequence[float]) -> None:
        """`shape` has relative costs that hold as far as nothing else is known."""
        self._shape = shape
        self._known: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._curve: Sequence[float] = ()

    def took(self, rows: int, seconds: float) -> None:
        if self._known:
            self._counts[rows] = count = self._counts.get(rows, 0) + 1
            seconds = _moved(self.curve()[rows - 1], seconds, count)
        self._known[rows] = seconds
        self._curve = ()

    def curve(self) -> Sequence[float]:
        if not self._curve:
            known = {rows: seconds / self._shape[rows - 1] for rows, seconds in self._known.items()}
            factors = _between(known, len(self._shape))
            costs = [factor * cost for factor, cost in zip(factors, self._shape, strict=True)]
            self._curve = [max(costs[0], cost) for cost in costs]
        return self._curve


def _moved(average: float, latest: float, count: int) -> float:
    """Returns the average after one more measurement, of which there were `count` before."""
    most = average * _MOST_CHANGE
    return average + max(-most, min(most, latest - average)) * max(_LEAST_WEIGHT, 1 / (count + 1))


def _between(known: dict[int, float], most: int) -> list[float]:
    """Returns values for 1 to `most` rows: known ones, on straight lines between them, and level beyond the last."""
    rows = sorted(known)
    values = [known[rows[0]]] * rows[0]
    for left, right in pairwise(rows):
        slope = (known[right] - known[left]) / (right - left)
        values += [known[left] + slope * (row - left) for row in range(left + 1, right + 1)]
    values += [known[rows[-1]]] * (most - len(values))
    return values[:most]
