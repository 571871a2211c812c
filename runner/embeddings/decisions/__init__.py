"""Models that decide: instead of text they compute a score for each option of a question, for `POST /v1/score`.

    decider.py     checks a body, and answers it
    laya.py        an encoder; each text has one question with its options, and a state
    clef.py        a Qwen 3.5 with a head that scores the options of all questions about a text together

The models are classes of mlx-vlm. This package calls their layers in pieces, so that other requests have turns.
"""
