"""The figures of `scripts/bench media`, and their report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from runner.settings import DEFAULT_MAX_GAP_MS
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.parallel.clients import Gaps

SEES, BLIND = "with the tower", "--no-media"
CASES, OTHER = ("first", "again", "turn"), "other"
PICTURE, TEXT = "picture", "text"
TURN_RATIO, TEXT_RATIO = 1.10, 0.98


class Asked(NamedTuple):
    """One turn: milliseconds to the first token of each case, and the prompt's tokens that each computed."""

    ms: Mapping[str, float]
    computed: Mapping[str, int]


@dataclass(frozen=True)
class MediaReport(Report):
    """All of it, turn by turn. `gaps` are those beside the large photo, `piece_s` the tower's longest slice of it."""

    asked: Mapping[str, Sequence[Asked]]
    rates: Mapping[str, Sequence[float]]
    gaps: Sequence[Gaps]
    piece_s: float

    def ms(self, kind: str, case: str) -> float:
        """The median."""
        return median(asked.ms[case] for asked in self.asked[kind])

    def ratio(self, case: str) -> float:
        """The median of a turn's ratios, the picture's over that of text."""
        return median_ratio(*([asked.ms[case] for asked in self.asked[kind]] for kind in (PICTURE, TEXT)))

    @property
    def targets(self) -> list[Target]:
        """As text of the same length, and nothing for those who send none."""
        found = [Target(f"{case}, a picture over text", self.ratio(case), TURN_RATIO) for case in CASES[1:]]
        text = median_ratio(self.rates[SEES], self.rates[BLIND])
        found.append(Target("text, tokens/s with the tower over those without", text, TEXT_RATIO, most=False))
        bound = DEFAULT_MAX_GAP_MS + 1e3 * self.piece_s
        found += [Target("largest gap beside a photo", 1e3 * gap.largest_s, bound, unit=" ms") for gap in self.gaps]
        return found

    @property
    def tables(self) -> Sequence[Table]:
        """Milliseconds, speeds and gaps."""
        cases = [*CASES, OTHER]
        firsts = [
            (
                kind,
                *(f"{self.ms(kind, case):,.1f}" if case in turns[-1].ms else "" for case in cases),
                " ".join(map(str, turns[-1].computed.values())),
            )
            for kind, turns in self.asked.items()
        ]
        speeds = [(name, f"{median(found):,.1f}") for name, found in self.rates.items()]
        gaps = [
            (
                f"{1e3 * gap.largest_s:,.0f}",
                f"{1e3 * gap.median_s:,.0f}",
                "-" if gap.newcomer_s is None else f"{gap.newcomer_s:,.1f} s",
                f"{1e3 * self.piece_s:,.0f}",
            )
            for gap in self.gaps
        ]
        turns = len(self.asked[TEXT])
        return [
            Table(
                f"time to the first token, ms: medians of {turns} turns",
                ("", *cases, "prompt tokens computed"),
                firsts,
            ),
            Table("an answer to text, tokens/s", ("", "tokens/s"), speeds),
            Table(
                "gaps beside a photo of 12 megapixels, ms",
                ("largest", "median", "first token about it", "longest slice of the tower, alone"),
                gaps,
            ),
        ]

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        asked = {kind: [turn._asdict() for turn in turns] for kind, turns in self.asked.items()}
        gaps = [gap._asdict() for gap in self.gaps]
        return {"asked": asked, "rates": self.rates, "gaps": gaps, "piece_s": self.piece_s}

    @property
    def charts(self) -> Sequence[Chart]:
        """The three cases that text has, too."""
        values = {kind: [self.ms(kind, case) for case in CASES] for kind in self.asked}
        return [Bars("time to the first token, ms", CASES, values, digits=1)]
