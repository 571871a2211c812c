"""Faults armed in a process while it runs: the test's side of `faulty.py`."""

import time
from pathlib import Path

_MOST_S = 60.0


class FaultControl:
    """Arms one fault at a time in the process that was spawned with `environment`. Owner: the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.environment = {"FAULT_DIR": str(directory)}

    def arm(self, point: str, fault: str) -> None:
        """Makes the next call at `point` raise this fault."""
        unseen = self._directory.with_name(f"{self._directory.name} draft")
        unseen.write_text(fault)
        unseen.rename(self._directory / point)  # whole, or not there

    def raised(self, point: str) -> bool:
        """Returns True once the armed fault has been raised."""
        return not (self._directory / point).exists()

    def hold(self, point: str) -> None:
        """Makes the process wait at `point` until `release`."""
        self.arm(point, "wait")

    def await_held(self, point: str) -> None:
        """Waits until the process has arrived at `point`."""
        reached = self._directory / f"{point} reached"
        deadline = time.monotonic() + _MOST_S
        while not reached.exists():
            assert time.monotonic() < deadline, f"the process never reached {point}"
            time.sleep(0.01)
        reached.unlink()

    def release(self, point: str) -> None:
        """Lets the process continue."""
        (self._directory / point).unlink()
