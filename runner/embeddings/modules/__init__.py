"""Encoders that mlx-lm lacks: `embedding_gemma2` is EmbeddingGemma 2. Encoders have `encode` in place of a cache.

`runner.process.lean_mlx_lm` lets `mlx_lm.models.NAME` import the module NAME of this package, or of
`runner/model/modules`, where the decoders are.
"""
