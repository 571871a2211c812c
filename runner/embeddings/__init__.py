"""Embeddings: texts and their media to vectors, for a model that makes these and no text.

A text has no cache and no prefix that another one could use: each of its tokens sees those on both sides. What makes
many of them quick is that texts which wait at the same time are computed in one forward, the shorter ones padded. Hosts
send every text in a request of its own.

    wing.py        joins an engine whose model is an encoder; the facts for `mlx-runner check`
    embedder.py    the texts that wait, and their forwards, a piece of one between two looks into the engine's mailbox
    decisions/     texts with questions, and forwards that end in scores of their options

The endpoints are `runner/server/embeddings.py` and `score.py`, which see the ports `Embedder` and `Decider`
(`runner/engine/ports.py`) alone; the encoder is a module of `runner/model/modules`. Owner of everything here: the
engine thread, but for what reads bodies.
"""
