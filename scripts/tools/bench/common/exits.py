"""Exit statuses of `scripts/bench`."""

MEASURED = MET, MISSED = 0, 1
"""There is a report: all targets are met, or some are missed."""
USAGE, BUSY = 2, 3
"""No report: wrong options; other programs use the machine."""
