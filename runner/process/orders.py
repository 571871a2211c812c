"""A process that parses the bytes of strangers: it answers one order at a time, within its limits of memory and time.

Libraries that decode may be slow, greedy or broken. In a process they can be ended at any moment, have a limit of
memory and of processor time, and never hold up another thread by the interpreter's lock.
"""

import resource
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import ceil
from pathlib import Path
from typing import ClassVar

import msgspec

from runner.errors import MediaError
from runner.process.child import Channel, ChildProcess

_LOOK_S = 0.05
"""The time between two looks for an answer, and for a client that has left."""
_LOADING_S, _PATIENCE = 30, 4
"""The longest wait for an answer: the time for loading libraries, and a multiple of the order's processor time, since
the process may get only a part of a core."""


class Limited(msgspec.Struct, array_like=True, frozen=True):
    """An order, with its limits of memory and processor time."""

    memory_bytes: int
    seconds: float


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The end of an order: an error, or the number of messages that follow."""

    error: str
    parts: int


class OrderProcess:
    """The runner's side. Starts the process with the first order. Owner: one thread at a time."""

    module: ClassVar[str]
    """The module whose `serve` runs in the process."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    def _answers(
        self, order: Limited, pieces: Sequence[memoryview], left: Callable[[], bool], task: str, medium: str
    ) -> list[bytes]:
        """Returns the messages with which the process answers an order and the pieces after it.

        Raises MediaError for a damaged file, and for one that takes more memory or time than its size explains. Ends
        the process and raises MediaError as soon as `left` returns True, or after a long wait for the answer.
        """
        if left():
            raise MediaError(f"{task}: the client has left")
        if self._child is None:
            self._start()
        try:
            most_s = _LOADING_S + _PATIENCE * order.seconds
            answer, parts = self._asked([msgspec.json.encode(order), *pieces], most_s, left, task)
        except (EOFError, OSError):
            self._stop()
            raise MediaError(
                f"{task}: decoding takes more memory or time than a {medium} of this size should: save it in"
                " another format"
            ) from None
        if answer.error:
            raise MediaError(answer.error)
        return parts

    def _asked(
        self, messages: Iterable[bytes | memoryview], seconds: float, left: Callable[[], bool], task: str
    ) -> tuple[Answer, list[bytes]]:
        """Returns the answer to messages, and the messages after it. Raises EOFError or OSError if the process ends.

        Ends the process and raises MediaError if there is no answer within `seconds`: someone may have stopped it. The
        time is counted in looks, since there are none while this process is stopped too.
        """
        assert self._child is not None
        with ThreadPoolExecutor(1, "ask") as thread:  # the connection to a process that was stopped blocks when full
            asked = thread.submit(_exchanged, Channel(self._child.connection), messages)
            reason = f"the decoding process did not answer in {seconds:.0f} s and was ended: send it again"
            for _ in range(ceil(seconds / _LOOK_S)):
                if _answered(asked):
                    return asked.result()
                if left():
                    reason = "the client has left"
                    break
            self._child.process.kill()  # before the connection is closed, which the thread uses
        self._stop()
        raise MediaError(f"{task}: {reason}")

    def _start(self) -> None:
        self._child = ChildProcess(self.module)

    def _stop(self) -> None:
        """Ends the process. The next order starts another."""
        if self._child is not None:
            self._child.close()
        self._child = None


def _exchanged(channel: Channel, messages: Iterable[bytes | memoryview]) -> tuple[Answer, list[bytes]]:
    for message in messages:
        channel.send(message)
    answer = msgspec.json.decode(channel.receive(), type=Answer)
    return answer, [channel.receive() for _ in range(answer.parts)]


def _answered(asked: "Future[tuple[Answer, list[bytes]]]") -> bool:
    """Looks for an answer, for a moment."""
    return bool(wait([asked], _LOOK_S).done)


def answer_order(channel: Channel, order: Limited, base_bytes: int, compute: Callable[[], list[bytes]]) -> None:
    """Runs in the process: sends the results of `compute`, or the text of its MediaError. Beyond the order's time, and
    its memory on top of `base_bytes`, the process ends."""
    _limit(base_bytes + order.memory_bytes, order.seconds)
    parts, error = list[bytes](), ""
    try:
        parts = compute()
    except MediaError as refusal:
        error = str(refusal)
    _limit(resource.RLIM_INFINITY, 0)
    for message in (msgspec.json.encode(Answer(error, len(parts))), *parts):
        channel.send(message)


def _limit(most_bytes: int, seconds: float) -> None:
    """Bounds the memory, on Linux alone, and the processor time, after which the process ends."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def address_bytes() -> int:
    """Returns the address space that this process has, on Linux alone."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
