"""Numbers for people: the log lines of requests, the progress of prompts, statistics, metrics, and the page.

The scheduler notifies its `Observer` (`runner/engine/core.py`), which this wing sets. All other numbers are read
between two slices when a client asks; other wings give theirs by `Parts.counts`. Without this wing the runner answers
all the same, and counts nothing. Read in this order:

    wing.py             joins an engine, and collects all its numbers
    journal.py          the observer: log lines, progress and counters
    distributions.py    distributions over all requests
    figures.py          the numbers of one request
    cache.py            the prefix cache in plain data
    endpoints.py        GET /v1/stats, /v1/cache, /v1/events and /metrics, and the page in page/
    stats_cache.py      the latest numbers, for all clients; metrics.py makes a scrape of them
    top.py              `mlx-runner top`, which reads a runner; table.py shows its numbers

The engine thread owns the first five, the event loop the endpoints, `stats_cache.py` and `metrics.py`.
"""
