"""Heads that draft: small models in the packages of larger ones, which predict from the hidden states of their target
what comes after the next token (multi-token prediction). Owner: the engine thread.

Read in this order: `head` (a head, the tokens that it drafts, and the modules of two families), `load`.
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
