"""The tables of mutants fit the code; `scripts/test --mutants` applies them."""

import ast

import pytest

from tests import ROOT
from tests.mutants import Mutant, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda each: f"{each.file}: {each.breaks}")
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    """If this fails, change `old` to the present code, or drop the row if that code is gone."""
    assert not mutant.misfit
    assert mutant.new != mutant.old
    ast.parse((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new))
    for word in mutant.by.split():
        assert (ROOT / word.partition("::")[0]).is_file()


def test_every_mutant_has_words_of_its_own() -> None:
    names = [(each.file, each.breaks) for each in mutants()]
    assert len(names) == len(set(names))
