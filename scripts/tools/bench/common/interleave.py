"""Contenders that take turns: what disturbs the machine disturbs all of them alike."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Figure = TypeVar("Figure")


def take_turns(contenders: Mapping[str, Callable[[], Figure]], turns: int, *, warm: int = 1) -> dict[str, list[Figure]]:
    """Each once a turn; who begins changes from turn to turn. The first `warm` turns do not count.

    Returns the figures of each, turn by turn: those with the same index were found one right after the other, so ratios
    of contenders are taken turn by turn.
    """
    names = list(contenders)
    found: dict[str, list[Figure]] = {name: [] for name in names}
    for turn in range(-warm, turns):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            figure = contenders[name]()
            if turn >= 0:
                found[name].append(figure)
    return found
