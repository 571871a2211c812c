"""An MLX runner for Ollama hosts: one process for one model, which answers completions over loopback HTTP.

Read `app.py` first, which starts the process, then the packages in the order in which a request passes them:
`cli`, `server`, `engine`, `cache`, `model`, `tokenizer` and `sampling`. `assemble.py` builds an engine from these
packages and from the wings in `wings.py`, each of which is one capability. docs/architecture.md is the map of the
packages: a package imports only packages below it there (tests/unit/test_house.py).
"""

__version__ = "0.1.0"
