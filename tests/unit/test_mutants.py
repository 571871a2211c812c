"""The tables of mutants fit the code; `scripts/test --mutants` applies them."""

import ast
from pathlib import Path

import pytest

from tests import ROOT
from tests.mutants import mutants, sweep


def test_every_mutant_fits_the_code() -> None:
    """If this fails, change `old` to the present code, or drop the row if that code is gone."""
    assert [mutant.misfit for mutant in mutants() if mutant.misfit] == []
    for mutant in mutants():
        assert mutant.new != mutant.old, mutant
        for word in mutant.by.split():
            assert (ROOT / word.partition("::")[0]).is_file(), mutant


@pytest.mark.full
def test_every_mutant_is_code() -> None:
    for mutant in (each for each in mutants() if each.file.endswith(".py")):
        ast.parse((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new), str(mutant))


def test_every_mutant_has_words_of_its_own() -> None:
    names = [(each.file, each.breaks) for each in mutants()]
    assert len(names) == len(set(names))


def test_a_sweep_changes_one_place_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "module.py"
    source = (
        'def f(x: int = 1) -> int:\n    """Says."""\n    if not x < 3:\n        raise ValueError(0)\n    return x + 1\n'
    )
    path.write_text(source)
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    assert [(each.old, each.new) for each in sweep.mutants_of(path, "")] == [
        (source, source.replace(old, new))
        for old, new in (
            *(("not x < 3", "(True)"), ("not x < 3", "(False)"), ("not x < 3", "(x < 3)")),
            *(("x < 3", "(x <= 3)"), ("x < 3", "(x >= 3)"), ("3", "(7)"), ("raise ValueError(0)", "pass")),
            *(("x + 1", "(None)"), ("x + 1", "(x - 1)"), ("+ 1", "+ (3)")),
        )
    ]
