"""The stand-in runner, as an executable of several words."""

import sys
from pathlib import Path

STAND_IN = (sys.executable, "-I", "-S", str(Path(__file__).with_name("stand_in.py")))
