"""Counts, logs and shows what the engine does.

`journal.py` is the only part that the scheduler talks to: it calls `began`, `prefilled`, `ended` and `never_began` as
requests pass through. The journal adds to the counters (`counters.py`), which never decrease, and reports the progress
of long prompts (`progress.py`) on the terminal's status line or, without a terminal, in the log.

All of it belongs to the engine thread, and costs about a microsecond a slice. `runner/engine/report.py` reads the
counters for the page and the metrics; `runner/engine/trace.py`, which times the parts of a slice, stands apart. Read
`journal.py` first.
"""
