"""Bounds of time that hold on a quiet machine, stretched where others want its cores."""

import os
from pathlib import Path


def stretched(seconds: float) -> float:
    """Returns these seconds, or as many times more as there are processes for each core that want to run."""
    wanting = os.getloadavg()[0]
    try:
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        wanting = max(wanting, float(running))
    except OSError:  # no Linux: the average of the last minute has to do
        pass
    return seconds * max(1.0, wanting / (os.cpu_count() or 1))
