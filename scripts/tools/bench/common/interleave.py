"""Contenders measured in rounds, A B A B, so that noise of the machine hits all of them alike."""

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Figure = TypeVar("Figure")
Name = TypeVar("Name", bound=Hashable)


def interleave(
    contenders: Mapping[Name, Callable[[], Figure]], rounds: int, *, warm: int = 1
) -> dict[Name, list[Figure]]:
    """Measures each contender once a round; the first one changes from round to round. `warm` rounds are discarded.

    Returns the figures of each contender, round by round: those with the same index were found one right after the
    other, so ratios of contenders are taken round by round.
    """
    names = list(contenders)
    found: dict[Name, list[Figure]] = {name: [] for name in names}
    for number in range(-warm, rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            figure = contenders[name]()
            if number >= 0:
                found[name].append(figure)
    return found
