"""The report of `scripts/bench format`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.report import Report, Table, Target
from scripts.tools.bench.format.answers import FREE, JUMPS, NO_JUMPS, Answered, Answers
from scripts.tools.bench.format.compiling import Compiled
from scripts.tools.bench.format.masks import Masked

MOST_PERCENT = 15.0
"""That a grammar may add to a decode step of the 10 M model."""
AIMED_VOCABULARY = 32768


@dataclass(frozen=True)
class FormatReport(Report):
    """All of it; `step_us` is a decode step without a server and without a grammar, by vocabulary, turn by turn."""

    turns: int
    step_us: Mapping[int, Sequence[float]]
    masks: Sequence[Masked]
    compiling: Sequence[Compiled]
    answers: Sequence[Answers]

    @property
    def targets(self) -> list[Target]:
        """Of the vocabulary that has one."""
        return [
            Target(
                f"vocabulary {one.vocabulary:,}, {name}: added to a step", _added(one, name), MOST_PERCENT, unit=" %"
            )
            for one in self.answers
            if one.vocabulary == AIMED_VOCABULARY
            for name in one.grammars
            if name != FREE
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """Medians."""
        return [self._costs(), self._applying(), self._grammars(), self._jumps(), self._compiling()]

    @property
    def note(self) -> str:
        """The meaning of the columns."""
        return (
            f"Medians of {self.turns} turns, of percentages and ratios turn by turn. host: to take a token and to find "
            "the\nnext mask; device: what the mask adds to an argmax that is read."
        )

    def _costs(self) -> Table:
        rows = []
        for one in self.masks:
            step, device = median(self.step_us[one.vocabulary]), median(one.device[min(one.device)])
            for place, times in one.host.items():
                host = median(times)
                share = f"{100 * (host + device) / step:.1f}"
                rows.append((f"{one.vocabulary:,}", place, f"{host:.0f}", f"{device:.0f}", f"{step:.0f}", share))
        return Table("the mask of one token, us", ("vocabulary", "", "host", "device", "step", "% of it"), rows)

    def _applying(self) -> Table:
        counts = sorted({count for one in self.masks for count in one.device})
        rows = [
            (f"{one.vocabulary:,}", *(f"{median(one.device[count]):.0f}" for count in counts)) for one in self.masks
        ]
        columns = ("vocabulary", *(f"{count} rows" if count > 1 else "1 row" for count in counts))
        return Table("to apply a mask, us", columns, rows)

    def _grammars(self) -> Table:
        rows = [
            (
                f"{one.vocabulary:,}",
                name,
                f"{median(each.decode_per_s for each in turns):.1f}",
                f"{_added(one, name):.1f}",
            )
            for one in self.answers
            for name, turns in one.grammars.items()
        ]
        return Table("answers that nothing forces", ("vocabulary", "", "tokens/s", "% added"), rows)

    def _jumps(self) -> Table:
        rows = [
            (
                f"{one.vocabulary:,}",
                name,
                str(turns[0].tokens),
                f"{median(each.whole_per_s for each in turns):.1f}",
                f"{_gain(one, name):.2f}",
            )
            for one in self.answers
            for name, turns in one.jumps.items()
        ]
        title = "a record that is mostly forced, from the request to its end"
        return Table(title, ("vocabulary", "", "tokens", "tokens/s", "over one by one"), rows)

    def _compiling(self) -> Table:
        rows = [
            (f"{one.vocabulary:,}", name, f"{median(times):.1f}", f"{max(times):.1f}")
            for one in self.compiling
            for name, times in {"view of the vocabulary, once": one.build_ms, **one.compile_ms}.items()
        ]
        return Table("to compile, ms", ("vocabulary", "", "median", "worst"), rows)

    def data(self) -> Mapping[str, object]:
        """For JSON, a value for each turn."""
        return {
            "turns": self.turns,
            "step_us": {str(vocabulary): turns for vocabulary, turns in self.step_us.items()},
            "masks": [
                {
                    "vocabulary": one.vocabulary,
                    "host_us": one.host,
                    "device_us": {str(count): turns for count, turns in one.device.items()},
                }
                for one in self.masks
            ],
            "compiling": [one._asdict() for one in self.compiling],
            "answers": [
                {
                    "vocabulary": one.vocabulary,
                    "added_percent": {name: _added(one, name) for name in one.grammars},
                    "grammars": _columns(one.grammars),
                    "jumps": _columns(one.jumps),
                }
                for one in self.answers
            ],
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """The cost of a mask, and the time to compile a grammar."""
        groups = [f"{one.vocabulary:,}" for one in self.masks]
        costs = {f"host, {place}": [median(one.host[place]) for one in self.masks] for place in self.masks[0].host}
        device = [median(one.device[min(one.device)]) for one in self.masks]
        names = list(self.compiling[0].compile_ms)
        compiling = {f"{one.vocabulary:,}": [median(one.compile_ms[name]) for name in names] for one in self.compiling}
        lines = [name.replace(" ", "\n") for name in names]
        return [
            Bars("a token's mask, us", groups, {**costs, "device": device}),
            Bars("to compile, ms", lines, compiling, digits=1, log=True),
        ]


def _added(one: Answers, name: str) -> float:
    """Percent of a step without a format, the median of turns."""
    pairs = zip(one.grammars[FREE], one.grammars[name], strict=True)
    return median(100 * (free.decode_per_s / bound.decode_per_s - 1) for free, bound in pairs)


def _gain(one: Answers, name: str) -> float:
    pairs = zip(one.jumps[name], one.jumps[NO_JUMPS], strict=True)
    return median(jumped.whole_per_s / drawn.whole_per_s for jumped, drawn in pairs)


def _columns(found: Mapping[str, Sequence[Answered]]) -> Mapping[str, object]:
    return {name: [each._asdict() for each in turns] for name, turns in found.items()}


__all__ = ["AIMED_VOCABULARY", "JUMPS", "MOST_PERCENT", "FormatReport"]
