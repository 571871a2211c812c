"""Measures how much a call lets other threads run."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def beats_during(call: Callable[[], T]) -> tuple[T, int]:
    """Returns the result of `call`, and how often a thread that wakes every millisecond ran meanwhile."""
    going, beats = threading.Event(), [0]

    def beat() -> None:
        while not going.wait(0.001):
            beats[0] += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        before = beats[0]
        result = call()
        during = beats[0] - before
    finally:
        going.set()
        thread.join()
    return result, during
