"""DFlash: models that draft a block of tokens in one forward, from hidden states of their target.

The block is the last token of the text and a mask token for each draft. Its rows see each other, and a context: keys
and values that are made of hidden states after chosen layers of the target. The table of embeddings and the output
layer are the target's.

Read in this order: `dflash_config` (config.json, and opening by headers, without MLX), `drafter` (its layers and its
drafts), `fitting` (checking against the target, and loading). All but `dflash_config` belongs to the engine thread.
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
