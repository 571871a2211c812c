"""Numbers for people: the log lines of requests, the progress of prompts, statistics, metrics, and the page.

The scheduler notifies an `Observer` (`runner/engine/core.py`) of requests and slices: this wing's journal. All other
numbers, and those that other wings provide by `Parts.counts`, are read between two slices, when a client asks. Without
this wing the runner answers requests as usual, but counts nothing. Read in this order:

    wing.py         sets an engine's observer, and collects all numbers of the engine
    journal.py      the observer: log lines, progress, counters, and distributions over all requests
    figures.py      the numbers of one request
    cache.py        describes the prefix cache in plain data
    endpoints.py    GET /v1/stats, /v1/cache, /v1/events and /metrics, and the page in page/
    stats_cache.py  keeps the latest numbers for all clients; metrics.py formats them for Prometheus
    top.py          `mlx-runner top`, which asks a running runner; table.py shows the answer in a terminal

The engine thread owns the first four. The event loop owns `endpoints.py`, `stats_cache.py` and `metrics.py`.
"""
