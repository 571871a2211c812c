"""A group without processes, and one of two processes that share models."""

from collections.abc import Iterator
from typing import cast

import mlx.core as mx
import pytest

from tests.model.ranks.pair import Pair, pair


class _OneOf:
    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


def one_of(ranks: int, rank: int = 0) -> mx.distributed.Group:
    """A group for loading, which needs nobody else; nothing can be computed with it."""
    return cast("mx.distributed.Group", _OneOf(ranks, rank))


@pytest.fixture(autouse=True)
def alone_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loads with `one_of` has nobody to ask."""
    monkeypatch.setattr(mx.distributed, "all_min", lambda number, **_: number)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A group of two processes, for all tests of a file."""
    with pair(tmp_path_factory.mktemp("pair")) as members:
        yield members
