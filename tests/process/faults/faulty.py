"""The runner with a fault in it, as a script: `FAULT` names what goes wrong.

* `slow-load`  reading a tensor file takes ten seconds
* `on-demand`  a test arms faults while the process runs, by files in the directory `FAULT_DIR`: see `OnDemand`
"""

import contextlib
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[3])  # not this folder: its modules are no top-level ones

from runner import cpu  # noqa: E402
from tests.process.faults.fault_points import FAULTS, LOADING, POINTS, watching  # noqa: E402

WAIT = "wait"
for_good = contextlib.ExitStack()


class OnDemand:
    """A fault at one of the points of `fault_points.py`.

    A file named after the point contains the name of a fault. The next call at the point removes the file and raises
    the fault. If the file contains `wait`, the process creates `NAME reached` and waits until the file is removed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, point: str) -> None:
        asked = self._directory / point
        try:
            fault = asked.read_text()
        except FileNotFoundError:
            return
        if fault == WAIT:
            (self._directory / f"{point} reached").touch()
            while asked.exists():
                time.sleep(0.005)
            return
        asked.unlink()
        raise FAULTS[fault]()


def slow_load() -> None:
    """Every `mx.load` sleeps first."""
    import mlx.core as mx

    load = mx.load

    def slow(*arguments: object, **options: object) -> object:
        time.sleep(10)
        return load(*arguments, **options)  # type: ignore[arg-type]  # as they came

    mx.load = slow  # type: ignore[assignment]


def on_demand() -> None:
    """In place before the runner's own first line."""
    hook = OnDemand(Path(os.environ["FAULT_DIR"]))
    for_good.enter_context(watching(hook, *POINTS, *(LOADING.keys() - POINTS.keys())))


def main() -> None:
    cpu.preload()
    faults = {"slow-load": slow_load, "on-demand": on_demand}
    faults[os.environ["FAULT"]]()
    from runner.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
