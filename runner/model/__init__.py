"""Finding, opening, checking and loading models.

`open_model` needs no MLX; `runner.model.weights.load` turns what it found into an mlx-lm module, on the thread that
runs it.
"""

from runner.model.opened import OpenedModel, open_model

__all__ = ["OpenedModel", "open_model"]
