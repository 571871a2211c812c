"""Finds, opens, checks and loads models.

A model is loaded in two steps. First `open_model` reads manifests, configs and the headers of weight files, and raises
ModelError for a broken one; this step is quick and needs no MLX. Then `weights.loading.load` reads the weights into an
mlx-lm module. Any thread may read an `OpenedModel`, which is immutable. The code in `weights` runs on the engine
thread, which owns MLX.

Read in this order: `opened` (the steps of opening), `sources` (readers of files on disk), `module_config`,
`layer_counts`, `architectures` (a row for each), `modules` (models that mlx-lm does not have) and `decoder` (parts that
these models share), `fields` (readers of config fields), `renamed` (fields that transformers has renamed), `packing`;
then `weights`, with `progress`, and `trials`.
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm: registers it without its __init__
from runner.model.opened import OpenedModel, open_model

__all__ = ["OpenedModel", "open_model"]
