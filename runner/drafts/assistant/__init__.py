"""Assistants of Gemma 4: small models that draft from what their target has computed. They have no keys and values of
their own: they look at those of the target.

Read in this order: `opening` (by headers, without MLX), `load` (the network, the keys and values that it looks at, and
whether it fits its target), `drafter` (the tokens of one answer). All but `opening` belongs to the engine thread.
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
