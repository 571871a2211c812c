"""Embeddings: texts and their media to vectors, for a model that makes these and no text.

A text has no cache and no prefix that another text could use: each of its tokens sees the tokens on both sides. Many
texts are quick because those waiting at the same time are computed in one forward, the shorter ones padded. Hosts send
every text in a request of its own.

    wing.py        joins an engine whose model is an encoder; the facts for `mlx-runner check`
    endpoint.py    POST /v1/embeddings: checks a body, and answers it
    embedder.py    the texts that wait, and their forwards, a piece of one between two looks into the engine's mailbox
    decisions/     POST /v1/score of models that decide: texts with questions, and forwards that end in scores
    modules/       the encoders that mlx-lm lacks

The engine sees two ports (`runner/engine/ports.py`): `Beside`, which the embedder is, and `EncoderUse`, which holds the
endpoints; the server reads bodies, decodes media and writes for these. Owner of everything here: the engine thread,
except for the endpoints.
"""
