"""A child process that decodes untrusted files: it answers one order at a time, with limits of memory and time.

Libraries that decode files may be slow, take much memory or crash. In a process of their own they can be ended at any
moment, have limits of memory and processor time, and do not block other threads by the interpreter's lock.
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
"""The time between two checks for an answer and for a client that has left."""
_LOADING_S, _PATIENCE = 30, 4
"""The longest wait for an answer is the sum of two times: for loading libraries, and a multiple of the order's
processor time, since the process may get only a part of a core."""


class Limited(msgspec.Struct, array_like=True, frozen=True):
    """An order, with limits for the memory and the processor time that the process may use for it."""

    memory_bytes: int
    seconds: float


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The first message of an answer: an error or, if that is empty, the number of messages that follow."""

    error: str
    parts: int


class OrderProcess:
    """The runner's side of the process. The first order starts the process. Owner: one thread at a time."""

    module: ClassVar[str]
    """The name of the module whose function `serve` runs in the process."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    def _answers(
        self, order: Limited, pieces: Sequence[memoryview], left: Callable[[], bool], task: str, medium: str
    ) -> list[bytes]:
        """Sends an order and the `pieces` that belong to it, and returns the messages of the answer.

        Raises MediaError for a damaged file, and for one that takes too much memory or time for its size. Ends the
        process and raises MediaError when `left` returns True, or after a long wait. `task` begins all messages.
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
        """Sends `messages`. Returns the answer, and its messages. Raises EOFError or OSError if the process ends.

        Ends the process and raises MediaError if there is no answer within `seconds`: someone may have stopped the
        process. The time is counted in checks: it stands still while the runner is stopped.
        """
        assert self._child is not None
        with ThreadPoolExecutor(1, "ask") as thread:  # a send to a stopped process may block
            asked = thread.submit(_exchanged, Channel(self._child.connection), messages)
            reason = f"the decoding process did not answer in {seconds:.0f} s and was ended: send it again"
            for _ in range(ceil(seconds / _LOOK_S)):
                if _answered(asked):
                    return asked.result()
                if left():
                    reason = "the client has left"
                    break
            self._child.process.kill()  # first, since the thread still uses the connection, which `_stop` closes
        self._stop()
        raise MediaError(f"{task}: {reason}")

    def _start(self) -> None:
        self._child = ChildProcess(self.module)

    def _stop(self) -> None:
        """Ends the process. The next order starts a new one."""
        if self._child is not None:
            self._child.close()
        self._child = None


def _exchanged(channel: Channel, messages: Iterable[bytes | memoryview]) -> tuple[Answer, list[bytes]]:
    for message in messages:
        channel.send(message)
    answer = msgspec.json.decode(channel.receive(), type=Answer)
    return answer, [channel.receive() for _ in range(answer.parts)]


def _answered(asked: "Future[tuple[Answer, list[bytes]]]") -> bool:
    """Waits a moment for an answer, and returns True if there is one."""
    return bool(wait([asked], _LOOK_S).done)


def answer_order(channel: Channel, order: Limited, base_bytes: int, compute: Callable[[], list[bytes]]) -> None:
    """Runs in the child process: sends the results of `compute`, or the text of its MediaError. The process ends if it
    exceeds the order's time, or the order's memory in addition to `base_bytes`."""
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
    """Limits this process to `most_bytes` of memory (on Linux) and `seconds` of processor time (0: no limit)."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def address_bytes() -> int:
    """Returns the size of this process's address space on Linux, and 0 on other systems."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
