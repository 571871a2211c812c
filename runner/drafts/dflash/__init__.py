"""DFlash, DFlash 2 and DSpark: models that draft a block of tokens in one forward, from hidden states of their target.

The block is the last token of the text and a mask token for each draft. The rows of a block attend to each other and to
a context. The context is keys and values, made of the outputs of chosen layers of the target. A DFlash draft uses the
target's table of embeddings and the target's output layer.

All kinds share one network. In DFlash 2 each branch of a layer has convolutions around it. A selector (DFlash 2) or a
head (DSpark) then chooses the drafts one after the other, each by the draft before it. DSpark makes the first draft of
the row of the last token, and so needs one mask token fewer.

Read in this order: `dflash_config` reads config.json and opens a draft by its headers, without MLX; `drafter` has the
network and drafts with it; `fitting` checks a draft against a target, and loads it. Owner of the last two: the engine
thread."""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm
