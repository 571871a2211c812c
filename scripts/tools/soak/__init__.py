"""`scripts/soak MINUTES`: random clients against one runner, every answer checked against a runner without a cache.

Read `main.py` first: it spawns both runners and starts everything else. `subject.py` makes their model, a tiny one or
links to a real one. `clients.py` holds the clients: they chat, branch, cancel and retry. `checker.py` asks the second
runner for the right answers, `meter.py` samples memory and latency. `verdict.py` holds the limits and decides whether
the run passed. Clients that attack are in tests/process/hostile.
"""
