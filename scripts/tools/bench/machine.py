"""The machine: its description, its BLAS, and the use that other programs make of it."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

from runner import cpu
from runner.cli.convert import blas_threads

BLAS = ("MLX_RUNNER_BLAS", "MLX_RUNNER_BLAS_THREADS")
"""The variables by which all processes of a benchmark have the same BLAS."""
MOST_OTHERS = 0.15
"""Cores that others may use while something is measured."""
_LOOK_S = 2.0
_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # idle, iowait


class BusyError(Exception):
    """Other programs use the machine, so that measurements would tell more about them."""


class _Moment(NamedTuple):
    at: float
    busy_s: float
    own_s: float


class Others:
    """The cores used by other programs, from here on. Child processes count as ours once they have ended."""

    def __init__(self) -> None:
        self._begin = _moment()

    def cores(self) -> float | None:
        """Returns their average number; None where the system does not tell."""
        end = _moment()
        if self._begin is None or end is None:
            return None
        busy_s, own_s = end.busy_s - self._begin.busy_s, end.own_s - self._begin.own_s
        return max(0.0, busy_s - own_s) / (end.at - self._begin.at)

    def check(self) -> None:
        cores = self.cores()
        if cores is not None and cores > MOST_OTHERS:
            raise BusyError(f"the machine is busy: others use {cores:.2f} of its {os.cpu_count()} cores")


def check_quiet() -> None:
    """Watches the machine for some seconds. Raises `BusyError`."""
    if not _STAT.exists():
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores / 2:
            raise BusyError(f"the machine is busy: its load is {load:.1f} on {cores} cores")
        return
    others = Others()
    sleep(_LOOK_S)
    others.check()


def preload_blas() -> str:
    """Loads the BLAS that the environment names, before anything imports MLX. Returns its name. Raises UsageError, and
    ValueError for a wrong number of threads."""
    choice, threads = (os.environ[name] for name in BLAS)
    return cpu.preload(choice, blas_threads({"blas-threads": threads})).blas


def describe_machine(fast_blas: str) -> dict[str, object]:
    """Returns hardware and versions. `load` is the average number of runnable processes over the last minute."""
    import mlx.core as mx

    return {
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "device": mx.device_info().get("device_name") or str(mx.default_device()),
        "BLAS": fast_blas,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def _moment() -> _Moment | None:
    """None where there is no /proc."""
    if sys.platform != "linux":
        return None
    ticks = [int(number) for number in _STAT.read_text().split("\n", 1)[0].split()[1:9]]  # guests count as users
    busy = sum(ticks) - sum(ticks[_IDLE])
    return _Moment(perf_counter(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))
