"""The report of `scripts/bench parallel`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from scripts.tools.bench.common.figure import Bars, Chart, Lines
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.parallel.clients import PATIENCE_S, SUFFIXES, Dropped, Gaps, Rate, Shared

Cell = tuple[str, int]
"""A measurement, with its number of streams, or the number of tokens of its prompt or prefix."""
Figure = Rate | Gaps | Dropped | Shared
OURS, IN_TURN, MLX_LM, BARE = "ours", "in-turn", "mlx_lm.server", "bare-loop"

RATIO_TARGET = 2.5
"""Of what 8 streams decode together to what one decodes."""
GAP_TARGET_MS = 300.0
DROP_TARGET_MS = 150.0
SHARED_TARGET = 1.3
_TARGET_STREAMS = (1, 8)

_Kind = TypeVar("_Kind", bound=Figure)
_NOTE = f"""Figures are medians over the turns, except where they say worst; targets hold for the median of a turn's
ratio, the median of drop, and the worst gap of all turns.
*           the streams never ran all at once: all their tokens, from the very first line to the very last
newcomer    until the first token of the prompt that came; -: not within {PATIENCE_S:.0f} s, so it was given up
bound       the first prompt alone and cold, plus each of the {len(SUFFIXES) - 1} others alone with a known prefix"""


@dataclass(frozen=True)
class ParallelReport(Report):
    """By contender and cell, turn by turn."""

    turns: int
    found: Mapping[str, Mapping[Cell, Sequence[Figure]]]

    @property
    def targets(self) -> list[Target]:
        """Of this runner, as far as they were measured."""
        found = []
        speeds = {number: _speeds(rates) for number, rates in self._of(OURS, "decode", Rate).items()}
        if set(speeds) >= set(_TARGET_STREAMS):
            ratio = median_ratio(*(speeds[number] for number in reversed(_TARGET_STREAMS)))
            found.append(Target("decode, 8 streams over 1", ratio, RATIO_TARGET, most=False))
        for length, gaps in self._of(OURS, "gap", Gaps).items():
            worst = max(1e3 * one.largest_s for one in gaps)
            found.append(Target(f"worst gap while {length} tokens are read", worst, GAP_TARGET_MS, unit=" ms"))
        for length, drops in self._of(OURS, "drop", Dropped).items():
            after = median(1e3 * one.after_s for one in drops)
            found.append(Target(f"first token after a drop at {length}", after, DROP_TARGET_MS, unit=" ms"))
        for shared in self._of(OURS, "shared", Shared).values():
            ratio = median(one.ratio for one in shared)
            found.append(Target("shared prefix, last first token over the bound", ratio, SHARED_TARGET))
        return found

    @property
    def tables(self) -> Sequence[Table]:
        """One for each thing that was measured."""
        decode = self._rows("decode", Rate, _decode)
        gap, drop = self._rows("gap", Gaps, _gap), self._rows("drop", Dropped, _drop)
        shared = self._rows("shared", Shared, _shared)
        drop_title = "drop: first token of a short prompt the moment another client leaves in its prefill, ms"
        shared_title = f"shared: last first token of {len(SUFFIXES)} prompts with one prefix, ms"
        return [
            Table("decode", ("", "streams", "tokens/s of all"), decode),
            Table(
                "gap: between two lines of a running stream while a prompt comes, ms",
                ("", "prompt", "largest", "worst", "median", "newcomer"),
                gap,
            ),
            Table(drop_title, ("", "prompt", "its prefill", "short, idle", "short, drop", "worst"), drop),
            Table(shared_title, ("", "prefix", "cold", "others", "together", "over the bound", "worst"), shared),
        ]

    @property
    def note(self) -> str:
        """The meaning of the words."""
        return _NOTE

    def data(self) -> Mapping[str, object]:
        """For JSON: by contender, what was measured, and number, one value for each turn."""
        contenders: dict[str, dict[str, dict[str, object]]] = {}
        for name, cells in self.found.items():
            for (what, number), figures in cells.items():
                columns = {field: [getattr(one, field) for one in figures] for field in figures[0]._fields}
                contenders.setdefault(name, {}).setdefault(what, {})[str(number)] = columns
        return {"turns": self.turns, "contenders": contenders}

    @property
    def charts(self) -> Sequence[Chart]:
        """Throughput, gaps, waits and sharing, with their targets; a contender has one colour in all of them."""
        lines = {
            name: [(number, median(_speeds(rates))) for number, rates in rates_of.items()]
            for name in self.found
            if (rates_of := self._of(name, "decode", Rate))
        }
        gap = "largest gap of a stream while a prompt comes, worst turn, ms"
        drop, ratio = "first token of a short prompt after a client left, ms", "last first token over the bound"
        bars = [
            self._bars(gap, "gap", Gaps, lambda found: max(1e3 * one.largest_s for one in found), GAP_TARGET_MS),
            self._bars(drop, "drop", Dropped, lambda found: median(1e3 * one.after_s for one in found), DROP_TARGET_MS),
            self._bars(ratio, "shared", Shared, lambda found: median(one.ratio for one in found), SHARED_TARGET, 2),
        ]
        speeds = [Lines("tokens/s of all decoding streams", lines, "streams")] if lines else []
        return [*speeds, *(chart for chart in bars if chart.groups)]

    def _bars(
        self,
        title: str,
        what: str,
        kind: type[_Kind],
        value: Callable[[Sequence[_Kind]], float],
        target: float,
        digits: int = 0,
    ) -> Bars:
        found = {name: self._of(name, what, kind) for name in self.found}
        numbers = list(dict.fromkeys(number for by_number in found.values() for number in by_number))
        heights = {
            name: [value(by_number[number]) if number in by_number else None for number in numbers]
            for name, by_number in found.items()
        }
        return Bars(title, [f"{number} tokens" for number in numbers], heights, digits, target=target)

    def _of(self, name: str, what: str, kind: type[_Kind]) -> dict[int, list[_Kind]]:
        return {
            number: [one for one in figures if isinstance(one, kind)]
            for (measured, number), figures in self.found.get(name, {}).items()
            if measured == what
        }

    def _rows(
        self, what: str, kind: type[_Kind], cells: Callable[[Sequence[_Kind]], Sequence[str]]
    ) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = []
        for name in self.found:
            by_number = self._of(name, what, kind)
            rows += [(name, str(number), *cells(by_number[number])) for number in by_number]
        return rows


def _speeds(rates: Sequence[Rate]) -> list[float]:
    return [rate.tokens_per_s for rate in rates]


def _decode(rates: Sequence[Rate]) -> Sequence[str]:
    told = f"{median(_speeds(rates)):.1f}"
    return (told if all(rate.together for rate in rates) else f"{told}*",)


def _gap(gaps: Sequence[Gaps]) -> Sequence[str]:
    largest = [one.largest_s for one in gaps]
    came = [one.newcomer_s for one in gaps if one.newcomer_s is not None]
    times = (median(largest), max(largest), median(one.median_s for one in gaps))
    return (*map(_ms, times), _ms(median(came)) if came else "-")


def _drop(drops: Sequence[Dropped]) -> Sequence[str]:
    return [*(_ms(median(times)) for times in zip(*drops, strict=True)), _ms(max(one.after_s for one in drops))]


def _shared(shared: Sequence[Shared]) -> Sequence[str]:
    ratios = [one.ratio for one in shared]
    times = (_ms(median(times)) for times in zip(*shared, strict=True))
    return (*times, f"{median(ratios):.2f}", f"{max(ratios):.2f}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"
