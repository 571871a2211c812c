"""A decode step that waits for masks."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from runner.sampling.sample import Choice


class PausedStep(NamedTuple):
    """A step whose tokens are read, while the grammars advance along them."""

    choices: list[Choice]
    logits: mx.array | None
    """[B, 1, V], from the forward over these tokens; None if there was none."""

    def of(self, rows: Sequence[int]) -> "PausedStep":
        """Returns these rows of it."""
        logits = None if self.logits is None else self.logits[mx.array([*rows])]
        return PausedStep([self.choices[row] for row in rows], logits)
