"""The architectures of mlx-lm that can be split, and a group without processes."""

import importlib
from typing import cast

import mlx.core as mx

from scripts.tools.models.architectures import architectures, unserved

SERVED = tuple(name for name in architectures() if name not in unserved())
SPLITTING = tuple(name for name in SERVED if hasattr(importlib.import_module(f"mlx_lm.models.{name}").Model, "shard"))


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
