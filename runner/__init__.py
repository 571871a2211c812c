"""An MLX runner for Ollama hosts: one process for one model, which answers completions over loopback HTTP.

Read `app.py` first, which wires the process together, then the packages in the order in which a request meets them:
`cli`, `server`, `engine`, `cache`, `model`, `tokenizer` and `sampling`. `assemble.py` builds an engine of these and of
the wings in `wings.py`, each of which is one capability. docs/architecture.md is the map; imports point down only
(tests/unit/test_house.py).
"""

__version__ = "0.1.0"
