"""Faults in a spawned process, asked for while it runs: the test's side of `scripts/tools/conformance/faulty.py`."""

import time
from pathlib import Path

_MOST_S = 20.0


class Demand:
    """Asks the process that was spawned with `environment` for one fault at a time. Owner: the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.environment = {"FAULT": "on-demand", "FAULT_DIR": str(directory)}

    def ask(self, point: str, fault: str) -> None:
        """From now on the next call at `point` ends in this fault."""
        unseen = self._directory.with_name(f"{self._directory.name} draft")
        unseen.write_text(fault)
        unseen.rename(self._directory / point)  # whole, or not there

    def struck(self, point: str) -> bool:
        """Whether it did."""
        return not (self._directory / point).exists()

    def hold(self, point: str) -> None:
        """The process is to wait at `point`, until `release`."""
        self.ask(point, "wait")

    def await_held(self, point: str) -> None:
        """Returns when it waits there."""
        reached = self._directory / f"{point} reached"
        deadline = time.monotonic() + _MOST_S
        while not reached.exists():
            assert time.monotonic() < deadline, f"the process never got to {point}"
            time.sleep(0.01)
        reached.unlink()

    def release(self, point: str) -> None:
        """It goes on."""
        (self._directory / point).unlink()
