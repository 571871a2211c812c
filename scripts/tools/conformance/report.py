"""The report of a run: a table of cases and generations, as text or Markdown."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scripts.tools.conformance import SECTIONS, Case, Outcome
from scripts.tools.host.lib import Generation

PASS, FAIL, LESS, SAME, NOT_APPLICABLE, NOT_RUN = "pass", "fail", "less", "same", "n/a", "not run"
WORDS = {PASS: "ok", FAIL: "FAIL", LESS: "less", SAME: "=", NOT_APPLICABLE: "-", NOT_RUN: "?"}
SIGNS = {PASS: "✓", FAIL: "✗", LESS: "○", SAME: "=", NOT_APPLICABLE: "n/a", NOT_RUN: "?"}
LEGEND = {
    PASS: "passed",
    FAIL: "failed",
    LESS: "not done, but Ollama's own runner does not do it either",
    SAME: "passed: the host does the same as the next one to the right with {mark}",
    NOT_APPLICABLE: "does not apply",
    NOT_RUN: "could not be tried",
}


class Cell(NamedTuple):
    """One case for one generation: a mark, and the reason where it is not a pass."""

    mark: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The outcomes of a run by case and generation. Rows and columns keep the order they are given in."""

    command: Sequence[str]
    cases: Sequence[Case]
    generations: Sequence[Generation]
    outcomes: Mapping[tuple[Case, Generation], Outcome]

    def cells(self, case: Case) -> dict[str, Cell]:
        """Returns the row of a case: a cell for each generation's letter."""
        parts = case.parts(self.generations)
        return {generation.letter: self._cell(case, generation, part) for generation, part in parts.items()}

    def _cell(self, case: Case, generation: Generation, part: Generation | str) -> Cell:
        if isinstance(part, str):
            return Cell(NOT_APPLICABLE, part)
        outcome = self.outcomes[case, part]
        if outcome.mark != PASS:
            return Cell(_mark(case, outcome), outcome.reason)
        return Cell(PASS if part is generation else SAME)

    @property
    def failures(self) -> list[str]:
        return self._told(FAIL)

    @property
    def less(self) -> list[str]:
        """One line for each run that did no more than the original."""
        return self._told(LESS)

    def _told(self, mark: str) -> list[str]:
        return [
            f"{case.id} {generation.letter}: {outcome.reason}"
            for (case, generation), outcome in self.outcomes.items()
            if _mark(case, outcome) == mark
        ]

    @property
    def summary(self) -> str:
        counts = Counter(_mark(case, outcome) for (case, _), outcome in self.outcomes.items())
        names = {PASS: "passed", FAIL: "failed", LESS: "no more than the original", NOT_RUN: "could not be tried"}
        told = [f"{name}: {counts[mark]}" for mark, name in names.items() if counts[mark]]
        return "; ".join([f"cases: {len(self.cases)}", f"runs: {len(self.outcomes)}", *told])


def _mark(case: Case, outcome: Outcome) -> str:
    return LESS if case.beyond and outcome.mark == FAIL else outcome.mark


def as_text(report: Report) -> str:
    """Returns a table for a terminal, the meaning of its marks, and a line for each failure."""
    width = max(len(case.id) for case in report.cases)
    lines = [" " * width + "".join(f"{generation.letter:>5}" for generation in report.generations)]
    untried = []
    for case in report.cases:
        cells = report.cells(case)
        lines.append(f"{case.id:{width}}" + "".join(f"{WORDS[cell.mark]:>5}" for cell in cells.values()))
        reasons = dict.fromkeys(cell.reason for cell in cells.values() if cell.mark == NOT_RUN)
        untried += [f"? {case.id}: {reason}" for reason in reasons]
    lines += ["", ", ".join(f"{WORDS[mark]} {text.format(mark=WORDS[PASS])}" for mark, text in LEGEND.items())]
    found = [*(f"{WORDS[LESS]} {line}" for line in report.less), *(f"{WORDS[FAIL]} {line}" for line in report.failures)]
    return "\n".join([*lines, *untried, *found, report.summary])


INTRODUCTION = """\
# Compatibility

What each generation of Ollama hosts expects of an MLX runner, and what {runner} does. Each case starts the real
process and talks to it as that generation does. This command writes the page:

    scripts/conformance {arguments}

{summary}.

| | Releases of Ollama | Spawned as | Ready | Closed by |
|---|---|---|---|---|
"""


def as_markdown(report: Report, runner: str, arguments: str) -> str:
    """Returns the document docs/compatibility.md. `arguments` are those of the script that writes it."""
    notes: dict[str, int] = {}
    text = INTRODUCTION.format(runner=runner, arguments=arguments, summary=_sentence(report.summary))
    text += "".join(f"{_describe(generation)}\n" for generation in report.generations)
    legend = (f"{SIGNS[mark]} {meaning.format(mark=SIGNS[PASS])}" for mark, meaning in LEGEND.items())
    text += f"\n{'; '.join(legend)}.\n"
    for section in SECTIONS:
        cases = [case for case in section.cases if case in report.cases]
        if cases:
            letters = " | ".join(generation.letter for generation in report.generations)
            text += f"\n## {section.name}\n\n| | Case | {letters} |\n|---|---|{':-:|' * len(report.generations)}\n"
            text += "".join(f"{_row(case, report.cells(case), notes)}\n" for case in cases)
    text += "\n" + "".join(f"[^{number}]: {_sentence(reason)}.\n" for reason, number in notes.items())
    return text


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _describe(generation: Generation) -> str:
    words = shlex.join(generation.argv("M", 1)[:-1])
    ready = f"`GET {generation.ready_path}` is 200" + (" and decodes" if generation.ready_decodes else "")
    grace = generation.close_grace_s
    closed = f"SIGINT, SIGKILL {grace:.0f} s later" if grace else "SIGKILL"
    return f"| {generation.letter} | {generation.releases} | `{words} P` | {ready} | {closed} |"


def _row(case: Case, cells: Mapping[str, Cell], notes: dict[str, int]) -> str:
    marks = []
    for cell in cells.values():
        note = f"[^{notes.setdefault(cell.reason, len(notes) + 1)}]" if cell.reason else ""
        marks.append(SIGNS[cell.mark] + note)
    title = case.title.rstrip(".") + (" (*beyond the original*)" if case.beyond else "")
    return f"| {case.number} | {title} | {' | '.join(marks)} |"
