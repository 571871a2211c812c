"""Finds, opens, checks and loads models.

Two steps, kept apart because the first is quick and needs no MLX: `open_model` reads manifests, configs and the headers
of weight files, and refuses whatever is broken; `weights.loading.load` reads the weights into an mlx-lm module.

Owners: an `OpenedModel` is immutable, any thread may read it. Everything in `weights` runs on the engine thread, which
owns MLX.

Read in this order: `opened` (the steps of opening), `sources` (where files and tensors come from), `module_config`,
`layer_counts`, `architectures` (a row for each), `modules` (models that mlx-lm does not have) and `decoder` (their
common parts), `fields` (readers of a config), `renamed` (transformers' names for fields), `packing`; then `weights`,
with `progress`.
"""

import runner.process.lean_mlx_lm  # noqa: F401  # before any module here imports mlx_lm: registers it without its __init__
from runner.model.opened import OpenedModel, open_model

__all__ = ["OpenedModel", "open_model"]
