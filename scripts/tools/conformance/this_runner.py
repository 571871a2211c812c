"""The commands by which hosts start this repository's runner, whole and with a fault in it."""

import sys
from pathlib import Path

RUNNER = (sys.executable, "-m", "runner")
FAULTY = (sys.executable, str(Path(__file__).with_name("faulty.py")))
"""The same process with a fault built in, chosen by the environment variable `FAULT`."""
