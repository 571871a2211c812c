"""Encoders of ours, found as `mlx_lm.models.NAME` as the decoders in `runner/model/modules` are.

embedding_gemma2.py    EmbeddingGemma 2; `encode` in place of a cache
"""
