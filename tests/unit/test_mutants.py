"""The tables of mutants fit the code; `scripts/test --mutants` applies them."""

import ast

from tests import ROOT
from tests.mutants import mutants


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
