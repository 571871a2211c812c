"""Heads that draft: small models in the packages of larger ones, which predict from the hidden states of their target
what comes after the next token (multi-token prediction). Owner: the engine thread.

Read in this order: `target` (what a head shares with its target, and the target's hidden states), `head` (a head, and
the tokens that it drafts), `qwen3_5` and `nemotron_h` (the modules of two families), `load`.
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
