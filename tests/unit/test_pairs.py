"""Rows in place of a product leave out no pair."""

from itertools import combinations, product

from tests.lib.pairs import pairs


def test_every_two_values_of_different_axes_meet() -> None:
    axes = ("abcdefg", "1234", "xyz", "!")
    rows = pairs(*axes)
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(axes[i], axes[j]))
    assert len(rows) < 40  # of 84
    assert rows == pairs(*axes)
