"""Assistants of Gemma 4: small models that draft from what their target has computed. They have no keys and values of
their own: they look at those of the target. Owner: the engine thread.

Read in this order: `drafter` (the keys and values that an assistant looks at, its network, and the tokens that it
drafts), `load` (opening by headers, whether it fits its target, and loading).
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
