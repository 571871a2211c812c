"""Embeddings: turns texts and their media into vectors, with a model that makes embeddings and no text.

Texts cannot share a prefix in a cache, since each token sees the tokens on both sides. Hosts send every text in a
separate request. Texts that wait at the same time are computed in one forward, with padding after shorter texts.

    wing.py        adds the embedder and the endpoints to an engine; makes the facts for `mlx-runner check`
    endpoint.py    POST /v1/embeddings: checks a body, and answers it
    embedder.py    the texts that wait, and forwards over them, one piece between two looks into the engine's mailbox
    decisions/     POST /v1/score for models that decide: texts with questions, and forwards that return scores
    modules/       the encoders that mlx-lm lacks

The embedder and the endpoints implement two ports of `runner/engine/ports.py`: `Beside` and `EncoderUse`. The server
reads bodies, decodes media and writes answers. The engine thread owns all objects but the endpoints.
"""
