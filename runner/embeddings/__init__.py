"""Embeddings: texts and their media to vectors, for a model that makes these and no text.

Texts share no prefix in a cache, since each token sees the tokens on both sides. Hosts send every text in a request of
its own; texts that wait at the same time are computed in one forward, the shorter ones padded.

    wing.py        joins an engine whose model is an encoder; the facts for `mlx-runner check`
    endpoint.py    POST /v1/embeddings: checks a body, and answers it
    embedder.py    the texts that wait, and their forwards, one piece between two looks into the engine's mailbox
    decisions/     POST /v1/score of models that decide: texts with questions, and forwards that end in scores
    modules/       the encoders that mlx-lm lacks

The engine sees two ports (`runner/engine/ports.py`): `Beside`, the embedder, and `EncoderUse`, the endpoints. The
server reads bodies, decodes media and writes answers for them. The engine thread owns everything but the endpoints.
"""
