"""Counts, logs and shows what the engine does.

The scheduler talks to `journal.py` alone: it calls `began`, `prefilled`, `ended` and `never_began` as requests pass
through. The journal adds to the counters (`counters.py`), which never decrease, and reports the progress of long
prompts (`progress.py`) on the terminal's status line or, without a terminal, in the log.

`report.py` gathers all numbers for the page and the metrics when they ask; `trace.py` times the parts of each slice
into a file, when the user names one. All of it belongs to the engine thread; without a trace it costs about a
microsecond a slice. Read `journal.py` first.
"""
