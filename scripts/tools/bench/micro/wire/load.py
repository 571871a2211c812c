"""The load that the servers of `scripts/bench wire` are fed with, and its measurement."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from time import perf_counter, process_time, sleep, thread_time
from typing import NamedTuple

WORD = " word"
SHOWN = b'" word"'
"""What every line with content has in it once, whatever the protocol."""
_SETTLE_S = 0.1


class Load(NamedTuple):
    """Every `interval_s` each of the streams gets a line; with 0 as fast as it goes."""

    streams: int
    steps: int
    interval_s: float

    @property
    def lines(self) -> int:
        """Of all streams together."""
        return self.streams * self.steps

    def words(self) -> list[str]:
        """For a command line."""
        return [str(self.streams), str(self.steps), str(self.interval_s)]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Load":
        """From a command line."""
        streams, steps, interval_s = words
        return cls(int(streams), int(steps), float(interval_s))


class Used(NamedTuple):
    """CPU seconds of a server. `handed_s`: of the thread that computes, to hand lines over; `written_s`: of all others,
    to write them."""

    handed_s: float
    written_s: float


def feed(load: Load, step: Callable[[], None], drain: Callable[[], None]) -> None:
    """Tell the streams their words, as the thread that computes, and print what that took the process.

    `step` hands a word to each of the streams, `drain` returns when all words have been written.
    """
    sleep(_SETTLE_S)
    handed_s, step_at = 0.0, perf_counter()
    whole, own = process_time(), thread_time()
    for _ in range(load.steps):
        if load.interval_s:
            step_at += load.interval_s
            sleep(max(0.0, step_at - perf_counter()))
        begun = thread_time()
        step()
        handed_s += thread_time() - begun
    drain()
    own_s = thread_time() - own
    used = Used(handed_s, process_time() - whole - own_s)
    print(json.dumps(used), flush=True)


def wait_for_end() -> None:
    """The process ends when whoever started it closes its input."""
    sys.stdin.read()
    os._exit(0)
