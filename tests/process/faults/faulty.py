"""The runner, as a script, in which a test arms faults while it runs: by files in the directory `FAULT_DIR`.

A file named after a point of `fault_points.py` contains the name of a fault. The next call at the point removes the
file and raises the fault. If the file contains `wait`, the process creates `NAME reached` and waits until the file is
removed.
"""

import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[3])  # not this folder: its modules are no top-level ones

from runner import cpu  # noqa: E402
from tests.process.faults.fault_points import FAULTS, LOADING, POINTS, watching  # noqa: E402


def raise_armed(point: str) -> None:
    """Raises the fault that is armed at this point, or waits there."""
    directory = Path(os.environ["FAULT_DIR"])
    asked = directory / point
    try:
        fault = asked.read_text()
    except FileNotFoundError:
        return
    if fault == "wait":
        (directory / f"{point} reached").touch()
        while asked.exists():
            time.sleep(0.005)
        return
    asked.unlink()
    raise FAULTS[fault]()


def main() -> None:
    cpu.preload()
    with watching(raise_armed, *POINTS, *(LOADING.keys() - POINTS.keys())):  # before the runner's own first line
        from runner.__main__ import main as run

        run()


if __name__ == "__main__":
    main()
