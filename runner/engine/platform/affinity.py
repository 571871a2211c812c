"""One core for the engine: on a CPU, waking a thread on a core that sleeps can cost more than a small model's kernels.

MLX hands every operation of a forward to a thread of its own, hundreds of them for each token, and time and again one
of the two threads waits for the other. They seldom run at the same time, so next to nothing is lost when they share a
core. On two cores the kernel wakes the other one, which takes tens of microseconds where cores are virtual. As batch
threads they also do not interrupt each other: ten operations are handed over, then ten are computed, and the kernel
switches ten times for a token, not five hundred times.

Where waking is cheap or a model large, two cores are faster for answers: both ways are tried, now and then, on the
steps of real ones. Prompts, whose operations are few and long, gain nothing from the other core and lose by moving.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import clock_gettime, perf_counter
from typing import Protocol

from runner.engine.platform.comparison import Comparison
from runner.logs import Log

log = Log(__name__)
_TASKS = Path("/proc/self/task")
_LOOK_S = 0.25
_AGAIN_S = 2.0
_ENOUGH = 0.8  # of the time; with less, somebody else wants the core too


class Threads(Protocol):
    """The threads that are kept together."""

    def bind(self) -> None:
        """To the core on which the caller is."""

    def free(self) -> None:
        """To all cores that the process may use."""

    def cpu_s(self) -> float:
        """Seconds that they have run, all together."""
        ...


class OneCore:
    """Keeps threads on one core where that is faster, and as long as they have it nearly for themselves. Owner: the
    engine thread.

    A core that others want too is left to the kernel's choice for a while: cores that are busy anyway wake quickly.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._bound = False
        self._look_at = 0.0
        self._since = (0.0, 0.0)
        self._faster = Comparison()
        self._wanted = True

    def took(self, kind: int, seconds: float) -> None:
        """A step took so long; those of one kind take equally long."""
        if self._bound == self._faster.first:  # else somebody else has the core, or nobody has looked yet
            self._faster.took(kind, seconds)

    def work(self, prompts: bool = False) -> None:
        """Called between two slices; `prompts`: of those that run, some are not read yet."""
        now = perf_counter()
        wanted = self._faster.first or prompts
        if now < self._look_at and wanted == self._wanted:
            return
        self._wanted = wanted
        if not wanted:
            self._free()
            self._look_at = now + _LOOK_S
            return
        if self._bound and self._share(now) < _ENOUGH:
            self._free()
            self._look_at = now + _AGAIN_S
            return
        if not self._bound:
            self._threads.bind()
            self._bound = True
        self._since = (now, self._threads.cpu_s())
        self._look_at = now + _LOOK_S

    def rest(self) -> None:
        """Called before the engine waits for work: what comes then begins wherever there is room."""
        self._free()
        self._look_at = 0.0

    def _share(self, now: float) -> float:
        """Of the time since the last look, how much they have run."""
        at, cpu_s = self._since
        return (self._threads.cpu_s() - cpu_s) / (now - at)

    def _free(self) -> None:
        if self._bound:
            self._threads.free()
            self._bound = False


class LinuxThreads:
    """Threads of this process by their numbers; the caller of `bind` is one of them."""

    def __init__(self, numbers: Sequence[int], cores: set[int]) -> None:
        self._numbers = numbers
        self._cores = cores
        self._clocks = [~number << 3 | 6 for number in numbers]  # how Linux numbers the CPU clock of a thread
        self._current = ctypes.CDLL(None).sched_getcpu

    def bind(self) -> None:
        self._move({self._current()}, os.SCHED_BATCH)

    def free(self) -> None:
        self._move(self._cores, os.SCHED_OTHER)

    def cpu_s(self) -> float:
        return sum(map(clock_gettime, self._clocks))

    def _move(self, cores: set[int], policy: int) -> None:
        for number in self._numbers:
            os.sched_setaffinity(number, cores)
            os.sched_setscheduler(number, policy, os.sched_param(0))


def keep_together(start: Callable[[], None]) -> OneCore | None:
    """The calling thread and those that `start` makes it start: MLX its own. None where there is no choice of cores."""
    if sys.platform != "linux" or len(cores := os.sched_getaffinity(0)) < 2:
        return None
    try:
        one = {ctypes.CDLL(None).sched_getcpu()}
        os.sched_setaffinity(0, one)  # which threads inherit: that is how they are found
        try:
            start()
            numbers = [number for task in _TASKS.iterdir() if _cores(number := int(task.name)) == one]
        finally:
            os.sched_setaffinity(0, cores)
        threads = LinuxThreads(numbers, cores)
        threads.free()
        threads.cpu_s()
    except (OSError, AttributeError) as error:  # a sandbox may forbid any of it
        log.info("the engine is not kept on one core", why=str(error))
        return None
    return OneCore(threads)


def _cores(number: int) -> set[int]:
    """Of a thread, none if it has ended."""
    try:
        return os.sched_getaffinity(number)
    except ProcessLookupError:
        return set()
