"""What `scripts/bench parallel` found: as a table, as JSON and as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from scripts.tools.bench.common.report import Target
from scripts.tools.bench.parallel.clients import PATIENCE_S, SUFFIXES, Dropped, Gaps, Rate, Shared

OURS, IN_TURN, MLX_LM, BARE = "ours", "in-turn", "mlx_lm.server", "bare-loop"

RATIO_TARGET = 2.5
"""Of what 8 streams decode together to what one decodes."""
GAP_TARGET = 3.0
"""The most that the largest gap may be, over --max-gap-ms."""
DROP_TARGET_S = 0.15
SHARED_TARGET = 1.3
_TARGET_STREAMS = (1, 8)

_LEGEND = """
All figures are medians over the turns, except where they say worst or least; targets hold for the median of a turn's
ratio, the median of drop, and the worst gap of all turns.
*           the streams never ran all at once: all their tokens, from the very first line to the very last
newcomer    until the first token of the prompt that came; -: not within {patience:.0f} s, so it was given up: a miss
bound       the first prompt alone and cold, plus each of the {others} others alone with a known prefix"""


class Shape(NamedTuple):
    """How much of everything: see the options of the command."""

    streams: Sequence[int] = (1, 2, 4, 8)
    tokens: int = 128
    prompts: Sequence[int] = (500, 2000)
    prefix: int = 500
    max_gap_ms: int = 100


@dataclass
class Row:
    """What one contender did, turn by turn: by the number of streams, or by the length of a prompt."""

    name: str
    decode: dict[int, list[Rate]] = field(default_factory=dict)
    gap: dict[int, list[Gaps]] = field(default_factory=dict)
    drop: dict[int, list[Dropped]] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)

    def ratios(self, first: int, last: int) -> list[float]:
        """How much faster `last` streams decode than `first`, in each turn."""
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


class ParallelReport(NamedTuple):
    """All of it."""

    seed: int
    turns: int
    parameters: int
    shape: Shape
    rows: Sequence[Row]

    def table(self) -> str:
        """One table for each thing that was measured, and what its words mean."""
        head = (
            f"{self.turns} turns of each contender, one after another, each by itself; "
            f"{self.parameters / 1e6:.1f} M parameters; seed {self.seed}"
        )
        parts = [self._decode(), self._gap(), self._drop(), self._shared()]
        tables = ["\n".join(lines) for part in parts if len(lines := list(part)) > 2]
        return "\n\n".join([head, *tables]) + "\n" + _LEGEND.format(patience=PATIENCE_S, others=len(SUFFIXES) - 1)

    @property
    def targets(self) -> list[Target]:
        """Those of this runner, as far as they were measured."""
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

    def _decode(self) -> Iterator[str]:
        streams = self.shape.streams
        first, last = streams[0], streams[-1]
        aimed = (first, last) == _TARGET_STREAMS
        target = f"; target at 8: {RATIO_TARGET} times one stream" if aimed else ""
        yield f"decode: tokens/s of all streams, {self.shape.tokens} tokens each{target}"
        yield _line(
            "", *(f"{number} streams" if number > 1 else "1 stream" for number in streams), "ratio", "least", "most"
        )
        for row in self.rows:
            if row.decode:
                ratios = row.ratios(first, last)
                speeds = (_speed(row.decode[number]) for number in streams)
                told = (f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios)))
                yield _line(row.name, *speeds, *told, met=median(ratios) >= RATIO_TARGET if aimed else None)

    def _gap(self) -> Iterator[str]:
        limit_s = GAP_TARGET * self.shape.max_gap_ms / 1e3
        yield f"gap: between two lines of a running stream while a prompt comes, ms; target: {_ms(limit_s)} at most"
        yield _line("", "prompt", "largest", "worst", "median", "newcomer")
        for row, length in ((row, length) for length in self.shape.prompts for row in self.rows if length in row.gap):
            found = row.gap[length]
            worst = max(one.largest_s for one in found)
            came = [one.newcomer_s for one in found if one.newcomer_s is not None]
            yield _line(
                row.name,
                str(length),
                _ms(median(one.largest_s for one in found)),
                _ms(worst),
                _ms(median(one.median_s for one in found)),
                _ms(median(came)) if came else "-",
                met=worst <= limit_s and len(came) == len(found),
            )

    def _drop(self) -> Iterator[str]:
        yield (
            "drop: first token of a short prompt the moment another client leaves in its prefill, ms; "
            f"target: less than {_ms(DROP_TARGET_S)}"
        )
        yield _line("", "prompt", "its prefill", "short, idle", "short, drop", "worst")
        for row, length in ((row, length) for length in self.shape.prompts for row in self.rows if length in row.drop):
            found = row.drop[length]
            after_s = median(one.after_s for one in found)
            yield _line(
                row.name,
                str(length),
                _ms(median(one.cold_s for one in found)),
                _ms(median(one.idle_s for one in found)),
                _ms(after_s),
                _ms(max(one.after_s for one in found)),
                met=after_s < DROP_TARGET_S,
            )

    def _shared(self) -> Iterator[str]:
        yield (
            f"shared: last first token of {len(SUFFIXES)} prompts with a prefix of {self.shape.prefix} tokens, ms; "
            f"target: {SHARED_TARGET} times the bound at most"
        )
        yield _line("", "cold", "others", "bound", "together", "ratio", "least", "worst")
        for row in self.rows:
            if row.shared:
                ratios = [one.ratio for one in row.shared]
                yield _line(
                    row.name,
                    _ms(median(one.cold_s for one in row.shared)),
                    _ms(median(one.warm_s for one in row.shared)),
                    _ms(median(one.cold_s + one.warm_s for one in row.shared)),
                    _ms(median(one.together_s for one in row.shared)),
                    *(f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios))),
                    met=median(ratios) <= SHARED_TARGET,
                )

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

    def plot(self, path: Path) -> None:
        """Draws the picture."""
        from scripts.tools.bench.parallel.plot import draw  # matplotlib is there for those who draw

        draw(self.shape, self.rows, path)


def _speed(rates: Sequence[Rate]) -> str:
    told = f"{median(rate.tokens_per_s for rate in rates):.1f}"
    return told if all(rate.together for rate in rates) else f"{told}*"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def _line(name: str, *values: str, met: bool | None = None) -> str:
    verdict = {None: "", True: "   met", False: "   missed"}[met]
    return f"{name:<16}" + "".join(f"{value:>12}" for value in values) + verdict
