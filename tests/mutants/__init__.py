"""Known ways to break the code, each of which the tests must notice.

A row of a table (`*.toml` here) stands below the file that it changes, and says

* `breaks`: what goes wrong, in words;
* `old`: a piece of that file, which occurs in it once, and `new`: what takes its place;
* `by`: the tests that notice, as words for pytest.

`scripts/test --mutants` makes each change in a copy of the tree and runs those tests: at least one has to fail.
`tests/unit/test_mutants.py` sees to it that every row still fits the code.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple, cast

from tests import ROOT

TABLES = Path(__file__).parent


class Mutant(NamedTuple):
    """One row."""

    table: str
    file: str
    breaks: str
    old: str
    new: str
    by: str

    @property
    def misfit(self) -> str:
        """The reason why the row cannot be applied to the tree; empty if it can."""
        path = ROOT / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        if count != 1:
            return f"{self.table}: `{self.breaks}`: {self.file} has {count} times {self.old!r}"
        return ""

    def apply(self, root: Path) -> str:
        """Changes the file below `root`; returns what it was."""
        path = root / self.file
        before = path.read_text()
        path.write_text(before.replace(self.old, self.new))
        return before


def mutants() -> list[Mutant]:
    """All rows of all tables."""
    rows = []
    for path in sorted(TABLES.glob("*.toml")):
        for file, table in tomllib.loads(path.read_text()).items():
            rows += [Mutant(path.name, file, **cast("dict[str, str]", row)) for row in table]
    return rows
