"""The making of the demo models: tokenizer, dialogues, initial weights, training, files and evaluation.

`seeing` makes the one that sees.
"""

import runner.process.lean_mlx_lm  # noqa: F401  makes mlx_lm.models importable without mlx_lm's own start-up
