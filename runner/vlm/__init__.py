"""Models of mlx-vlm, for those who install the extra `vlm`: architectures that mlx-lm lacks, and their towers.

`source` chooses, from `config.json` alone, whether a model is mlx-lm's or mlx-vlm's. `packages` lists what was compared
with mlx-vlm's own computation (`tests/vlm`): nothing else is served unless the user asks for it. `module` builds such a
model in the form of mlx-lm's, for the loader that all models have. Only `module` imports mlx-vlm, when such a model is
loaded.
"""
