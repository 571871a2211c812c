"""The times between the tokens of an answer, while the runner does something else."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from scripts.tools.bench.common.report import Target, median_ratio

RATIO, LONGER_MS = 1.03, 2.0
"""The bounds of the median over that without it, and of what is added to the longest."""


class Gaps(NamedTuple):
    """The times in ms, turn by turn: of a runner that does it, and of one that does not."""

    beside: Sequence[Sequence[float]]
    plain: Sequence[Sequence[float]]

    def ratio(self, of: Callable[[Sequence[float]], float]) -> float:
        """The median of a turn's ratios of, for instance, the longest times."""
        return median_ratio(*([of(turn) for turn in turns] for turns in self))

    @property
    def longer_ms(self) -> float:
        """The median of what is added to the longest time of a turn."""
        return median(max(one) - max(other) for one, other in zip(self.beside, self.plain, strict=True))

    def targets(self, middle: str, longest: str) -> list[Target]:
        """The targets of the median and of the longest time, under these names."""
        return [
            Target(middle, self.ratio(median), RATIO),
            Target(longest, self.longer_ms, LONGER_MS, unit="ms"),
        ]

    def rows(self, prefix: str = "") -> list[Sequence[str]]:
        """The rows of a table: what it is, both times, and the ratio."""
        kinds: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (("median", median), ("longest", max))
        return [
            (f"{prefix}{what}", *(f"{median(map(of, turns)):.2f}" for turns in self), f"{self.ratio(of):.3f}")
            for what, of in kinds
        ]
