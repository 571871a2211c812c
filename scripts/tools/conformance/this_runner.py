"""What hosts start where this repository's runner is under test."""

import sys
from pathlib import Path

RUNNER = (sys.executable, "-m", "runner")
FAULTY = (sys.executable, str(Path(__file__).with_name("faulty.py")))
"""The same process with a fault built in, chosen by the environment variable `FAULT`."""
