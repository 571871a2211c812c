"""Encoders of ours: `embedding_gemma2` is EmbeddingGemma 2, with `encode` in place of a cache.

`runner.process.lean_mlx_lm` lets each be found as `mlx_lm.models.NAME`, as it does the decoders in
`runner/model/modules`.
"""
