"""Few rows in place of a product: every two values of different axes meet in one of them."""

from collections.abc import Iterable
from itertools import combinations, product


def pairs(*axes: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns rows with one value of each axis, the same ones in every run.

    A fault that shows in one value, or where two of them meet, shows in some row; a product finds more only where
    three must meet.
    """
    values = [tuple(axis) for axis in axes]
    cells = [[(axis, each) for each in names] for axis, names in enumerate(values)]
    order = {cell: place for place, cell in enumerate(cell for row in cells for cell in row)}
    missing = {frozenset(pair) for one, other in combinations(cells, 2) for pair in product(one, other)}
    rows = []
    while missing:
        row = set(min(missing, key=lambda pair: sorted(order[cell] for cell in pair)))
        for column in sorted(cells, key=len, reverse=True):
            if row.isdisjoint(column):
                row.add(max(column, key=lambda cell: sum(frozenset((cell, other)) in missing for other in row)))
        missing -= {frozenset(pair) for pair in combinations(row, 2)}
        rows.append(tuple(name for _, name in sorted(row)))
    return rows
