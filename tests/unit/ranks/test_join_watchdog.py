"""A process that waits for other ranks in vain is killed, even if none of its threads can run."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.lib.patience import stretched

PROGRAM = """
import sys, time
from runner.ranks.join_watchdog import join_watchdog
descriptor, seconds, works, reports = map(float, sys.argv[1:])
with join_watchdog(seconds, {int(descriptor): "rank 1"}, reports=bool(reports)):
    time.sleep(works)
"""


def run(act: Callable[[socket.socket], object], seconds: float, works: float, *, reports: bool) -> tuple[int, str]:
    """Runs a process with a peer, to which the test does something. Returns its exit status and its output."""
    far, near = socket.socketpair()
    words = [str(near.fileno()), str(seconds), str(works), str(int(reports))]
    with near:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stderr=subprocess.PIPE, text=True, pass_fds=[near.fileno()]
        )
    act(far)
    _, written = process.communicate(timeout=stretched(20))
    far.close()
    return process.returncode, written


def test_a_rank_that_joins_in_time_goes_on() -> None:
    assert run(lambda far: far.send(b"a frame"), 60, 0.3, reports=True) == (0, "")


@pytest.mark.parametrize("reports", [False, True])
def test_a_rank_that_takes_too_long_to_join_is_killed(reports: bool) -> None:
    line = "Error: the ranks could not be joined in 1 s\n" if reports else ""
    assert run(lambda far: None, 1, 600, reports=reports) == (-signal.SIGKILL, line)


def test_a_rank_that_waits_for_one_that_is_gone_is_killed() -> None:
    def leave(far: socket.socket) -> None:
        far.send(b"its last words")
        time.sleep(0.2)
        far.close()

    line = "Error: rank 1 ended while the ranks were joined\n"
    assert run(leave, 600, 600, reports=True) == (-signal.SIGKILL, line)
