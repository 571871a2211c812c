"""The vlm wing: serves models of mlx-vlm, which the extra `vlm` installs: architectures and towers that mlx-lm lacks.

`source` chooses the family of a model from `config.json` alone, before any other file is opened. The core calls it as a
`ChooseFamily`, and a chosen family of mlx-vlm has a `Library` (`runner/model/architectures.py`). `wing.VlmWing` gives
an engine the sight of such a model. mlx-vlm's processors and towers replace the families and towers of `runner/media`.
The other modules of `runner/media` are used as they are.

| read in this order | |
| --- | --- |
| `source`, `packages` | choose mlx-vlm for a model; list the packages that `tests/vlm` compared with mlx-vlm |
| `module` | gives a model of mlx-vlm the interface of mlx-lm's models, for the common loader |
| `wing`, `sight` | open mlx-vlm's tower and the forward; compute features, and the forward over features |
| `pictures` | finds the tokens of a picture by its size, and the picture's arrays |
| `process` | runs mlx-vlm's processor in a process, which makes the arrays of one picture at a time, within limits |

The tokens, keys and features of a picture are those of a prompt with this picture alone, so they do not depend on other
pictures. `module` and `sight` use MLX and belong to the engine thread; any thread may call the other modules. mlx-vlm
is imported when the first of its models is loaded.
"""

LIBRARY = "mlx_vlm"
NOT_INSTALLED = "mlx-vlm is not installed: pip install --no-deps --require-hashes -r requirements/vlm.lock"
