"""Heads that draft: small models in the packages of larger ones, which predict the token after the next one from the
hidden states of their target (multi-token prediction). Owner: the engine thread.

Read in this order: `head` (a head, its drafts, and the modules of two families), `head_plan` (finding and loading it).
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
