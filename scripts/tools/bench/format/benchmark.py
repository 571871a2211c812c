"""`scripts/bench format`: what structured output costs, and what it saves.

A Llama of random weights, of 10 million parameters beside those of its vocabulary, whose tokens random merges made.

added     decode steps over HTTP with a grammar that forces nothing, against no grammar at all
record    an answer that is mostly forced, its tokens appended as they come or drawn one by one
compile   schemas from small to large, none of which was asked for before, and the view of the vocabulary that the first
          of all has to wait for

Contenders take turns.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.options import numbers
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.format.answers import FREE, NO_JUMPS, Answered, Answers, measure_answers
from scripts.tools.bench.format.compiling import Compiled, measure_compiling
from scripts.tools.bench.format.models import tokenizer_of
from scripts.tools.bench.llamas import M10

SIZE = M10
MOST_PERCENT = 15.0
"""That a grammar may add to a decode step of the 10 M model."""
AIMED_VOCABULARY = 32768


@dataclass(frozen=True)
class FormatReport(Report):
    """By vocabulary."""

    turns: int
    answers: Mapping[int, Answers]
    compiling: Mapping[int, Compiled]

    @property
    def targets(self) -> list[Target]:
        """Of the vocabulary that has one."""
        return [
            Target(f"vocabulary {vocabulary:,}, {name}: added to a step", added, MOST_PERCENT, unit=" %")
            for vocabulary, answers in self.answers.items()
            if vocabulary == AIMED_VOCABULARY
            for name, added in _added(answers).items()
            if name != FREE
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """Medians."""
        grammars = [
            (f"{vocabulary:,}", name, f"{median(one.decode_per_s for one in found.grammars[name]):.1f}", f"{added:.1f}")
            for vocabulary, found in self.answers.items()
            for name, added in _added(found).items()
        ]
        jumps = [
            (
                f"{vocabulary:,}",
                name,
                str(turns[0].tokens),
                f"{median(_whole(turns)):.1f}",
                f"{median_ratio(_whole(turns), _whole(found.jumps[NO_JUMPS])):.2f}",
            )
            for vocabulary, found in self.answers.items()
            for name, turns in found.jumps.items()
        ]
        compiling = [
            (f"{vocabulary:,}", name, f"{median(times):.1f}", f"{max(times):.1f}")
            for vocabulary, found in self.compiling.items()
            for name, times in found.items()
        ]
        record = "a record that is mostly forced, from the request to its end"
        return [
            Table("answers that nothing forces", ("vocabulary", "", "tokens/s", "% added"), grammars),
            Table(record, ("vocabulary", "", "tokens", "tokens/s", "over one by one"), jumps),
            Table("to compile, ms", ("vocabulary", "", "median", "worst"), compiling),
        ]

    @property
    def note(self) -> str:
        """The number of turns."""
        return f"Medians of {self.turns} turns, of percentages and ratios turn by turn."

    def data(self) -> Mapping[str, object]:
        """For JSON, a value for each turn."""
        return {
            "turns": self.turns,
            "answers": {
                str(vocabulary): {
                    "added_percent": _added(found),
                    "grammars": {name: [one._asdict() for one in turns] for name, turns in found.grammars.items()},
                    "jumps": {name: [one._asdict() for one in turns] for name, turns in found.jumps.items()},
                }
                for vocabulary, found in self.answers.items()
            },
            "compile_ms": {str(vocabulary): found for vocabulary, found in self.compiling.items()},
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """The cost of a grammar, and the time to compile one."""
        names = list(next(iter(self.compiling.values())))
        compiling = {
            f"{vocabulary:,}": [median(found[name]) for name in names] for vocabulary, found in self.compiling.items()
        }
        groups = [f"{vocabulary:,}" for vocabulary in self.answers]
        grammars = next(iter(self.answers.values())).grammars
        added = {name: [_added(found)[name] for found in self.answers.values()] for name in grammars if name != FREE}
        return [
            Bars("added to a decode step, %", groups, added, digits=1, target=MOST_PERCENT),
            Bars("to compile, ms", [name.replace(" ", "\n") for name in names], compiling, digits=1, log=True),
        ]


def _added(answers: Answers) -> Mapping[str, float]:
    """Returns the percentages of a step without a format that each grammar adds, the median of turns."""
    free = [one.decode_per_s for one in answers.grammars[FREE]]
    speeds = {name: [one.decode_per_s for one in turns] for name, turns in answers.grammars.items()}
    return {name: 100 * (median_ratio(free, found) - 1) for name, found in speeds.items()}


def _whole(turns: Sequence[Answered]) -> list[float]:
    return [one.whole_per_s for one in turns]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument(
        "--vocabularies",
        type=numbers,
        default=(AIMED_VOCABULARY,),
        metavar="N,...",
        help=f"sizes of the vocabulary (default: {AIMED_VOCABULARY})",
    )
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="of each contender (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="of an answer (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> FormatReport:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    if min(arguments.turns, arguments.tokens) < 1:
        raise ValueError("there is at least one turn, and a token")
    answers, compiling = {}, {}
    for vocabulary in arguments.vocabularies:
        say(f"vocabulary {vocabulary}: compiling ...")
        compiling[vocabulary] = measure_compiling(tokenizer_of(vocabulary, arguments.seed), arguments.turns)
        say(f"vocabulary {vocabulary}: answers ...")
        answers[vocabulary] = measure_answers(vocabulary, SIZE, arguments)
    return FormatReport(arguments.turns, answers, compiling)
