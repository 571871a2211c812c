"""DFlash: models that draft a block of tokens in one forward, from hidden states of the model for which they draft.

The block is the last token of the text and a mask token for each draft. Its rows see each other, and as context keys
and values that are made of hidden states after chosen layers of the target. The table of embeddings and the output
layer are the target's.

Read in this order: `config` (config.json, and opening by headers, without MLX), `drafter` (its layers, and the tokens
that it drafts), `load` (whether it fits its target, and loading). All but `config` belongs to the engine thread.
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
