"""The report of `scripts/bench parallel`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeVar

from scripts.tools.bench.common.figure import Bars, Chart, Lines
from scripts.tools.bench.common.report import Report, Table, Target
from scripts.tools.bench.parallel.clients import PATIENCE_S, SUFFIXES, Dropped, Gaps, Rate, Shared

Found = TypeVar("Found")

OURS, IN_TURN, MLX_LM, BARE = "ours", "in-turn", "mlx_lm.server", "bare-loop"

RATIO_TARGET = 2.5
"""Of what 8 streams decode together to what one decodes."""
GAP_TARGET = 3.0
"""The most that the largest gap may be, over --max-gap-ms."""
DROP_TARGET_S = 0.15
SHARED_TARGET = 1.3
_TARGET_STREAMS = (1, 8)

_NOTE = f"""Figures are medians over the turns, except where they say worst or least; targets hold for the median of a
turn's ratio, the median of drop, and the worst gap of all turns.
*           the streams never ran all at once: all their tokens, from the very first line to the very last
newcomer    until the first token of the prompt that came; -: not within {PATIENCE_S:.0f} s, so it was given up: a miss
bound       the first prompt alone and cold, plus each of the {len(SUFFIXES) - 1} others alone with a known prefix"""


class Shape(NamedTuple):
    """The amounts: see the options of the command."""

    streams: Sequence[int] = (1, 2, 4, 8)
    tokens: int = 128
    prompts: Sequence[int] = (500, 2000)
    prefix: int = 500
    max_gap_ms: int = 100


@dataclass
class Row:
    """The results of one contender, round by round: by the number of streams, or by the length of a prompt."""

    name: str
    decode: dict[int, list[Rate]] = field(default_factory=dict)
    gap: dict[int, list[Gaps]] = field(default_factory=dict)
    drop: dict[int, list[Dropped]] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)

    def ratios(self, first: int, last: int) -> list[float]:
        """Returns the speed of `last` streams over that of `first`, in each round."""
        pairs = zip(self.decode.get(first, ()), self.decode.get(last, ()), strict=True)
        return [many.tokens_per_s / few.tokens_per_s for few, many in pairs]

    def data(self, shape: Shape) -> dict[str, object]:
        """For JSON."""
        return {
            "decode": {str(number): _columns(Rate, rates) for number, rates in self.decode.items()}
            | ({"ratio": self.ratios(shape.streams[0], shape.streams[-1])} if self.decode else {}),
            "gap": {str(length): _columns(Gaps, found) for length, found in self.gap.items()},
            "drop": {str(length): _columns(Dropped, found) for length, found in self.drop.items()},
            "shared": _columns(Shared, self.shared) | {"ratio": [one.ratio for one in self.shared]},
        }


def _columns(kind: type[NamedTuple], found: Sequence[tuple[object, ...]]) -> dict[str, list[object]]:
    return {name: [one[index] for one in found] for index, name in enumerate(kind._fields)}


@dataclass(frozen=True)
class ParallelReport(Report):
    """All of it."""

    seed: int
    turns: int
    parameters: int
    shape: Shape
    rows: Sequence[Row]

    @property
    def head(self) -> str:
        """The circumstances."""
        return (
            f"{self.turns} turns of each contender, one after another, each by itself; "
            f"{self.parameters / 1e6:.1f} M parameters; seed {self.seed}"
        )

    @property
    def tables(self) -> Sequence[Table]:
        """One for each thing that was measured."""
        return [self._decode(), self._gap(), self._drop(), self._shared()]

    @property
    def note(self) -> str:
        """The meaning of the words."""
        return _NOTE

    @property
    def targets(self) -> list[Target]:
        """The targets of this runner, as far as they were measured."""
        ours = next((row for row in self.rows if row.name == OURS), Row(OURS))
        found = []
        if (self.shape.streams[0], self.shape.streams[-1]) == _TARGET_STREAMS and ours.decode:
            ratio = median(ours.ratios(*_TARGET_STREAMS))
            found.append(Target("decode, 8 streams over 1", ratio, RATIO_TARGET, most=False))
        limit_ms = GAP_TARGET * self.shape.max_gap_ms
        for length, gaps in ours.gap.items():
            worst_ms = 1e3 * max(one.largest_s for one in gaps)
            found.append(Target(f"worst gap while {length} tokens are read", worst_ms, limit_ms, unit=" ms"))
        for length, drops in ours.drop.items():
            after_ms = 1e3 * median(one.after_s for one in drops)
            found.append(Target(f"first token after a drop at {length}", after_ms, 1e3 * DROP_TARGET_S, unit=" ms"))
        if ours.shared:
            ratio = median(one.ratio for one in ours.shared)
            found.append(Target("shared prefix, last first token over the bound", ratio, SHARED_TARGET))
        return found

    def _decode(self) -> Table:
        streams = self.shape.streams
        first, last = streams[0], streams[-1]
        aimed = (first, last) == _TARGET_STREAMS
        target = f"; target at 8: {RATIO_TARGET} times one stream" if aimed else ""
        rows = []
        for row in self.rows:
            if row.decode:
                ratios = row.ratios(first, last)
                verdict = _verdict(median(ratios) >= RATIO_TARGET) if aimed else ""
                rows.append((row.name, *(_speed(row.decode[number]) for number in streams), *_spread(ratios), verdict))
        names = (f"{number} streams" if number > 1 else "1 stream" for number in streams)
        title = f"decode: tokens/s of all streams, {self.shape.tokens} tokens each{target}"
        return Table(title, ("", *names, "ratio", "least", "most", ""), rows)

    def _gap(self) -> Table:
        limit_s = GAP_TARGET * self.shape.max_gap_ms / 1e3
        rows = []
        for row, length, found in self._by_length(lambda row: row.gap):
            worst = max(one.largest_s for one in found)
            came = [one.newcomer_s for one in found if one.newcomer_s is not None]
            times = (median(one.largest_s for one in found), worst, median(one.median_s for one in found))
            newcomer = _ms(median(came)) if came else "-"
            verdict = _verdict(worst <= limit_s and len(came) == len(found))
            rows.append((row.name, str(length), *map(_ms, times), newcomer, verdict))
        title = f"gap: between two lines of a running stream while a prompt comes, ms; target: {_ms(limit_s)} at most"
        return Table(title, ("", "prompt", "largest", "worst", "median", "newcomer", ""), rows)

    def _drop(self) -> Table:
        rows = []
        for row, length, found in self._by_length(lambda row: row.drop):
            cold_s, idle_s, after_s = map(median, zip(*found, strict=True))
            times = (cold_s, idle_s, after_s, max(one.after_s for one in found))
            rows.append((row.name, str(length), *map(_ms, times), _verdict(after_s < DROP_TARGET_S)))
        title = (
            "drop: first token of a short prompt the moment another client leaves in its prefill, ms; "
            f"target: less than {_ms(DROP_TARGET_S)}"
        )
        return Table(title, ("", "prompt", "its prefill", "short, idle", "short, drop", "worst", ""), rows)

    def _shared(self) -> Table:
        rows = []
        for row in self.rows:
            if found := row.shared:
                bound_s = median(one.cold_s + one.warm_s for one in found)
                cold_s, warm_s, together_s = map(median, zip(*found, strict=True))
                ratios = [one.ratio for one in found]
                times = map(_ms, (cold_s, warm_s, bound_s, together_s))
                rows.append((row.name, *times, *_spread(ratios), _verdict(median(ratios) <= SHARED_TARGET)))
        title = (
            f"shared: last first token of {len(SUFFIXES)} prompts with a prefix of {self.shape.prefix} tokens, ms; "
            f"target: {SHARED_TARGET} times the bound at most"
        )
        return Table(title, ("", "cold", "others", "bound", "together", "ratio", "least", "worst", ""), rows)

    def _by_length(self, of: Callable[[Row], Mapping[int, list[Found]]]) -> Iterator[tuple[Row, int, list[Found]]]:
        for length in self.shape.prompts:
            for row in self.rows:
                if found := of(row).get(length):
                    yield row, length, found

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {
            "seed": self.seed,
            "turns": self.turns,
            "parameters": self.parameters,
            **self.shape._asdict(),
            "limits": {
                "decode_ratio": RATIO_TARGET,
                "gap_s": GAP_TARGET * self.shape.max_gap_ms / 1e3,
                "drop_s": DROP_TARGET_S,
                "shared_ratio": SHARED_TARGET,
            },
            "contenders": {row.name: row.data(self.shape) for row in self.rows},
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """Throughput, gaps, waits and sharing, with their targets; a contender has one colour in all of them."""
        prompts = [f"prompt of {length} tokens" for length in self.shape.prompts]
        speeds = {
            row.name: [
                (number, median(rate.tokens_per_s for rate in rates)) for number, rates in sorted(row.decode.items())
            ]
            for row in self.rows
            if row.decode
        }

        def of(value: Callable[[Row, int], float | None]) -> dict[str, list[float | None]]:
            return {row.name: [value(row, length) for length in self.shape.prompts] for row in self.rows}

        gaps = of(lambda row, length: _worst(one.largest_s for one in row.gap.get(length, ())))
        drops = of(lambda row, length: _middle(one.after_s for one in row.drop.get(length, ())))
        shared = {row.name: [_middle((one.ratio for one in row.shared), scale=1)] for row in self.rows}
        gap_ms, drop_ms = GAP_TARGET * self.shape.max_gap_ms, 1e3 * DROP_TARGET_S
        return [
            *([Lines("tokens/s of all decoding streams", speeds, "streams")] if speeds else []),
            Bars("largest gap of a stream while a prompt comes, worst turn, ms", prompts, gaps, target=gap_ms),
            Bars("first token of a short prompt after a client left, ms", prompts, drops, target=drop_ms),
            Bars("last first token of prompts with one prefix", ["over the bound"], shared, 2, target=SHARED_TARGET),
        ]


def _worst(seconds: Iterable[float]) -> float | None:
    return 1e3 * max(values) if (values := [*seconds]) else None


def _middle(values: Iterable[float], scale: float = 1e3) -> float | None:
    return scale * median(found) if (found := [*values]) else None


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def _spread(ratios: Sequence[float]) -> Iterator[str]:
    return (f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios)))


def _speed(rates: Sequence[Rate]) -> str:
    told = f"{median(rate.tokens_per_s for rate in rates):.1f}"
    return told if all(rate.together for rate in rates) else f"{told}*"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"
