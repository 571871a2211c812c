"""Measuring on one core, as the runner keeps its engine on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import mlx.core as mx

from runner.engine.platform.affinity import keep_together
from runner.model.weights.dtype import device


def one_core() -> Callable[[], AbstractContextManager[None]]:
    """What surrounds a turn. To be called before MLX computes anything, for it must find MLX's thread."""
    core = keep_together(lambda: mx.eval(mx.zeros(1))) if device() == "cpu" else None

    @contextmanager
    def turn() -> Iterator[None]:
        if core is not None:
            core.work()
        try:
            yield
        finally:
            if core is not None:
                core.rest()

    return turn
