"""Models of mlx-vlm, of the extra `vlm`: architectures that mlx-lm lacks, and their towers. A wing.

`source` chooses the family of a model from `config.json` alone, before anything else is opened: the core sees a
`ChooseFamily`, and of a model of mlx-vlm a `Library` (`runner/model/architectures.py`). `wing.VlmWing` gives an engine
the sight of such a model, with mlx-vlm's own processors and towers in the place of a family and a tower of ours. It
stands above `runner/media`, which does the rest.

| read in this order | |
| --- | --- |
| `source`, `packages` | which models are mlx-vlm's; which packages were compared with it, by `tests/vlm` |
| `module` | a model in the form of mlx-lm's, for the loader that all models have |
| `wing`, `sight` | features of mlx-vlm's tower, the forward over them, and what opens both |
| `pictures` | a picture's tokens, by its size, and its arrays |
| `process` | a process with mlx-vlm's processor, which makes the arrays of one picture at a time, within limits |

The tokens, keys and features of a picture are those of a prompt with this picture alone, so they do not depend on other
pictures. `module` and `sight` belong to the engine thread and know MLX; any thread may
call the rest. mlx-vlm is imported with its first model.
"""

LIBRARY = "mlx_vlm"
NOT_INSTALLED = "mlx-vlm is not installed: pip install --no-deps --require-hashes -r requirements/vlm.lock"
