"""DFlash: models that draft a block of tokens in one forward, from hidden states of the model for which they draft.

The block is the last token of the text and a mask token for each draft. Its rows see each other, and as context keys
and values that are made of hidden states behind chosen layers of the target. The table of embeddings and the output
layer are the target's.

| module | what it is |
| --- | --- |
| `config` | `config.json` of such a model |
| `module` | its layers, and its context |
| `target` | what it shares with its target, and hidden states behind chosen layers |
| `load` | checks that it fits the target, and loads it |
| `drafter` | drafts the tokens of one answer after the other |

Everything but `config` runs on the engine thread, which owns MLX.
"""
