"""Heads that draft: small networks that come in the package of a larger model, the target. From the target's hidden
states a head predicts the token after the next one (multi-token prediction). Owner: the engine thread.

Read in this order: `head` has the networks of two families and the drafter; `head_plan` finds and loads a head."""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
