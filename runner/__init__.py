"""An MLX runner for Ollama hosts: one process for one model, which answers completions over loopback HTTP.

Read `app.py` first, which wires the process together, then the packages in the order in which a request meets them:
`cli` (flags and environment), `server` (HTTP, on the event loop), `engine` (the one thread that owns MLX), `cache`
(computed prompts, kept for the next request), `model` (files to a module of mlx-lm), `tokenizer` and `sampling`.
`assemble.py` builds an engine of these, and of its wings, each of which is one capability: `grammar` (structured
output), `drafts`, `media`, `disk` (a cache that survives the process), `tape` (recordings), `ranks` (one model in
several processes). `commands` holds what the program does besides serving, `ollama` the launcher and the hand-over,
`process` the process among others, `blas` a faster BLAS for Linux CPUs.

Imports point down only (tests/unit/test_house.py); docs/architecture.md is the map.
"""

__version__ = "0.1.0"
