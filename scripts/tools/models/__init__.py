"""Makers of tiny models with random weights: checkpoints, stores, tokenizers. They need no package for tests.

Start with `checkpoints.py` (a Hugging Face directory for every family and cache kind) and `store.py` (an Ollama store
around it). `tiny.py` and `architectures.py` build models in memory: one for every kind of layer cache, and every
architecture of mlx-lm. `scripted.py` writes a llama whose next token is known, `tokenizers.py` its tokenizer and
others.

The rest reproduces what loading meets in the wild: `sources*.py` models as they were published, of which `sources.toml`
and `configs.toml` have the data (`data.py` reads it), `layouts*.py` their tensors as each release of `ollama create`
stores them, `tensors.py` the bytes. `oracle.py` opens the same model through mlx-lm, for comparison.
"""
