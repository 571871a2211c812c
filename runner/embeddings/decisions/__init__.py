"""Models that decide: they score options by a head of their own, for `POST /v1/score`.

    decider.py     checks a body, and answers it
    laya.py        an encoder that reads a question, its options and a state, one text a question
    clef.py        a Qwen 3.5 whose head decides all questions of a text together

The classes are mlx-vlm's. Their layers are called one by one here, so that other requests have turns in between.
"""
