"""Tests on a real model, SmolLM2-135M-Instruct: `scripts/test --real`. They take minutes, and fetch 93 MB once.

`record.py` asks mlx-lm itself for greedy answers and writes them to `answers.json`; `test_answers.py` expects them of
the runner, then asks it in every other way: in formats, from the cache, together with others.
"""
