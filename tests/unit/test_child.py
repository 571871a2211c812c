"""A child process: its messages, what it holds of the runner, and its end."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.process.child import Channel, ChildProcess

PATIENCE_S = 60


def serve(channel: Channel) -> None:
    """Runs in the child. Sends what it holds, then each message back."""
    null = Path(os.devnull).stat().st_rdev
    holds_outputs = any(os.fstat(stream).st_rdev != null for stream in (0, 1, 2))
    dumps_core = resource.getrlimit(resource.RLIMIT_CORE) != (0, 0)
    listens = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    channel.send(bytes([holds_outputs, dumps_core, listens]))
    while True:
        channel.send(channel.receive())


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    child = ChildProcess(__name__)
    child.connection.settimeout(PATIENCE_S)
    yield child
    child.close()


def test_it_holds_none_of_the_runners_outputs_dumps_no_core_and_leaves_ctrl_c_to_the_runner(
    child: ChildProcess,
) -> None:
    assert Channel(child.connection).receive() == bytes(3)


def test_messages_of_any_size_arrive_whole_and_in_order(child: ChildProcess) -> None:
    channel = Channel(child.connection)
    channel.receive()
    for size in (0, 1, (1 << 16) - 8, 1 << 16, (1 << 20) + 1, 3 << 20):
        message = os.urandom(size)
        channel.send(memoryview(message))
        assert channel.receive() == message


def test_it_ends_with_its_connection(child: ChildProcess) -> None:
    Channel(child.connection).receive()  # so it waits for a message
    child.connection.close()
    assert child.process.wait(PATIENCE_S) == 0


def test_it_is_killed_whatever_it_does(child: ChildProcess) -> None:
    os.kill(child.process.pid, signal.SIGSTOP)
    child.close()
    assert child.process.returncode == -signal.SIGKILL
    child.close()
