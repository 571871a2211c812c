"""Tests by tier: see tests/README.md."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""The number of cores that this process may use."""
