"""`mlx-runner follow` and `--followers`, with real processes on 127.0.0.1."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from runner.ranks.handshake import prove_to_service
from scripts.tools.host.lib import Client, Process, Request, free_port
from tests.process.conftest import RANDOM, RUNNER, SpawnModel

WAIT_S = 60.0
REQUESTS = (
    Request("so many words about zebras " * 9, {"num_predict": 40, "temperature": 0}),
    Request("once upon a time ", {"num_predict": 40, "temperature": 0.9, "seed": 7}),
)
SECRET = b"f0e1d2c3b4a5968778695a4b3c2d1e0f"
Found = TypeVar("Found")


def eventually(look: Callable[[], Found | None], seconds: float = WAIT_S) -> Found:
    """Returns what `look` finds, within so many seconds."""
    until = time.monotonic() + seconds
    while (found := look()) is None:
        assert time.monotonic() < until, "it did not come to this in time"
        time.sleep(0.02)
    return found


def ended(pid: int) -> bool | None:
    """Returns True if the process is gone, else None."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return None


def maps(pid: int) -> str:
    """Returns what a process has mapped into its memory."""
    return Path(f"/proc/{pid}/maps").read_text()


class Service:
    """`mlx-runner follow` on a port of its own."""

    def __init__(self, models_dir: Path, secret: Path) -> None:
        words = [*RUNNER, "follow", "--listen", "127.0.0.1:0", "--secret-file", str(secret)]
        self.process = subprocess.Popen(
            [*words, "--models-dir", str(models_dir)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = self.told(r"waiting for leaders\" address=(\S+)")[0]
        self.models_dir, self.secret = models_dir, secret

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def told(self, pattern: str, count: int = 1) -> list[str]:
        """Returns what the pattern finds in the log, once it is found so often."""
        return eventually(lambda: found if len(found := re.findall(pattern, self.log)) >= count else None)

    def followers(self, count: int = 1) -> list[int]:
        """Returns the processes that this service has started, once there are so many."""
        return [int(pid) for pid in self.told(r'"a load begins" leader=\S+ process=(\d+)', count)]

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_S)

    @property
    def words(self) -> list[str]:
        """The flags of a leader."""
        return ["--followers", self.address, "--secret-file", str(self.secret)]


@pytest.fixture(name="secret")
def file_of_secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    return path


StartService = Callable[..., Service]


@pytest.fixture(name="serve")
def started(models_dir: Path, secret: Path) -> Iterator[StartService]:
    """Starts services for one test, and ends them."""
    services: list[Service] = []

    def start(models_dir: Path = models_dir) -> Service:
        services.append(Service(models_dir, secret))
        return services[-1]

    yield start
    for service in services:
        service.end()


async def answers(process: Process) -> list[str]:
    async with Client.of(process) as client:
        return [done.text for done in await asyncio.gather(*map(client.complete, REQUESTS))]


def refusal(process: Process) -> str:
    """Returns the line with which a leader ends."""
    assert process.wait(WAIT_S) == 1, process.output.text
    return process.output.lines[-1]


async def test_loads_follow_each_other_and_end_with_their_service(serve: StartService, start: SpawnModel) -> None:
    """Each answers as one process. The second leader comes as soon as the first is killed, as hosts do it."""
    service, plain = serve(), start(RANDOM)
    wanted = await answers(plain)
    first = start(RANDOM, service.words)
    assert await answers(first) == wanted
    assert 'msg="ranks are joined" ranks=2 backend=ring' in first.output.text
    (follower,) = service.followers()
    if sys.platform == "linux":
        assert "libmlx" not in maps(service.process.pid), "the service itself holds no model"
    first.kill()
    second = start(RANDOM, service.words)
    assert await answers(second) == wanted
    assert ended(follower)
    assert service.told(rf'"a load has ended" leader=\S+ process={follower} status="(.*?)"') == ["exit status 0"]
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(WAIT_S) == -signal.SIGTERM
    assert ended(service.followers(2)[1])
    assert refusal(second).startswith(f"Error: rank 1 ({service.address}) ended: ")
    assert "Traceback" not in service.log


def test_a_killed_follower_ends_its_leader_by_name(serve: StartService, start: SpawnModel) -> None:
    service = serve()
    leader = start(RANDOM, service.words)
    (follower,) = service.followers()
    service.process.send_signal(signal.SIGSTOP)  # the end is seen without it
    os.kill(follower, signal.SIGKILL)
    assert leader.wait(WAIT_S) == 1
    service.process.send_signal(signal.SIGCONT)
    assert leader.output.lines[-1] == (
        f"Error: rank 1 ({service.address}) ended: the log of `mlx-runner follow` there says why"
    )
    assert service.told(r'"a load has ended" .*status="(.*)"') == ["killed by signal 9"]


def test_a_service_that_is_not_there_is_named(start: SpawnModel, secret: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    leader = start(RANDOM, ["--followers", address, "--secret-file", str(secret)], ready=False)
    assert refusal(leader) == (f"Error: rank 1 ({address}): connection refused; is `mlx-runner follow` running there?")


def test_strangers_keep_nobody_out(serve: StartService) -> None:
    service = serve()
    with ExitStack() as open_ones:
        silent = [open_ones.enter_context(service.connect()) for _ in range(20)]
        with service.connect() as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert browser.makefile("rb").read().startswith(b"This is `mlx-runner follow`")
        with service.connect() as leader:
            prove_to_service(leader, SECRET)
            service.followers()
        assert silent[0].recv(1) == b""
    assert service.process.poll() is None
    assert "Traceback" not in service.log
