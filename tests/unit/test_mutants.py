"""The tables of mutants fit the code; `scripts/test --mutants` applies them."""

import ast
import threading
from collections.abc import Callable
from pathlib import Path

from tests import ROOT
from tests.mutants import mutants
from tests.mutants.sweep import in_child, mutants_of


def test_every_mutant_fits_the_code() -> None:
    """If this fails, change `old` to the present code, or drop the row if that code is gone."""
    assert [mutant.misfit for mutant in mutants() if mutant.misfit] == []
    for mutant in mutants():
        assert mutant.new != mutant.old, mutant
        ast.parse((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new), str(mutant))
        for word in mutant.by.split():
            assert (ROOT / word.partition("::")[0]).is_file(), mutant


def test_every_mutant_has_words_of_its_own() -> None:
    names = [(each.file, each.breaks) for each in mutants()]
    assert len(names) == len(set(names))


def test_a_sweep_changes_one_place_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'def f(x: int = 1) -> int:\n    """Says."""\n    if not x < 3:\n        raise ValueError(0)\n    return x + 1\n'
    )
    found = list(mutants_of(path))
    assert len({each.code for each in found}) == len(found)
    assert [each.words.partition(" -> ")[2] for each in found] == [
        *("if True:\n    raise ValueError(0)", "if False:\n    raise ValueError(0)", "x < 3", "x <= 3", "x >= 3", "7"),
        *("pass", "return None", "x - 1", "3"),
    ]


def test_a_sweep_waits_for_no_mutant_that_never_ends() -> None:
    def run(say: Callable[[str], None]) -> None:
        say("first")
        threading.Event().wait()

    assert list(in_child(run, 0.5)) == ["first"]
