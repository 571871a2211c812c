"""The exit of the process, beyond the conformance cases 9-11: in every phase, on SIGTERM, after the host's death."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

from protocol.stats import RequestCounts
from scripts.tools.conformance.assertions import generating, quiet
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Process, Request, StreamError, free_port
from tests.process.conftest import CHUNKED, FAULTY, HOST, MAIN, RUNNER, SpawnModel, linux_only, processor_s, read_stats
from tests.process.faults.fault_control import FaultControl

Phase = Literal["idle", "prefill", "decode", "queued"]
WAIT_S = 60.0
LONG_PROMPT = "y" * (CONTEXT - 10)


async def until(client: Client, reached: Callable[[RequestCounts], bool]) -> None:
    while not reached((await read_stats(client)).requests):
        await asyncio.sleep(0.02)


@asynccontextmanager
async def busy(process: Process, phase: Phase) -> AsyncIterator[None]:
    """Keeps the process in that phase inside the block; its exit may break the requests that keep it there."""
    async with Client.of(process) as client:
        tasks: list[asyncio.Task[object]] = []
        if phase == "prefill":
            tasks.append(asyncio.create_task(client.complete(Request(LONG_PROMPT))))
            await until(client, lambda requests: requests.running > 0)
        elif phase in ("decode", "queued"):
            async with generating(client):
                if phase == "queued":
                    tasks.append(asyncio.create_task(client.complete(Request("Hi"))))
                    await until(client, lambda requests: requests.queued > 0)
                yield
        if phase in ("idle", "prefill"):
            yield
        for task in tasks:
            with pytest.raises(StreamError):
                await asyncio.wait_for(task, WAIT_S)


def pids_with_port(port: int) -> list[int]:
    """Returns the ids of processes that were started with this port."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"--port\0{port}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("phase", "number"),
    [("idle", signal.SIGTERM), ("decode", signal.SIGTERM), ("prefill", signal.SIGINT), ("queued", signal.SIGINT)],
)
async def test_a_signal_ends_it_quietly(phase: Phase, number: signal.Signals, start: SpawnModel) -> None:
    process = start(arguments=[*CHUNKED, "--parallel", "1"])
    async with busy(process, phase):
        process.send_signal(number)
        assert await asyncio.to_thread(process.wait, WAIT_S) == -number
    quiet(process)


@pytest.mark.parametrize(
    ("delay_s", "number"),
    [(0.0, signal.SIGINT), (0.05, signal.SIGTERM), (0.15, signal.SIGINT), (0.3, signal.SIGTERM)],
    ids=str,
)
def test_a_signal_while_starting_ends_it(delay_s: float, number: signal.Signals, start: SpawnModel) -> None:
    process = start(ready=False)
    if number is signal.SIGINT:
        await_our_code(process)
    time.sleep(delay_s)
    process.send_signal(number)
    assert process.wait(WAIT_S) == -number
    quiet(process)


def await_our_code(process: Process) -> None:
    """Waits until Python's own start is over: in its first 20 ms SIGINT may print a traceback or be lost."""
    if not Path("/proc/self").exists():
        time.sleep(0.1)
        return
    was_caught, begun_s = False, None
    for _ in range(30_000):
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored, caught = (int(re.findall(rf"{name}:\t(\w+)", status)[0], 16) for name in ("SigIgn", "SigCgt"))
        if caught >> (signal.SIGINT - 1) & 1:
            was_caught = True
        elif was_caught:
            return
        elif ignored >> (signal.SIGPIPE - 1) & 1:  # Python takes SIGINT soon after this, or is past that moment
            now_s = processor_s(process.pid)
            begun_s = now_s if begun_s is None else begun_s
            if now_s - begun_s > 0.1:
                return
        time.sleep(0.002)
    raise AssertionError("the runner never got to its first line")


def test_a_signal_while_loading_ends_it_quietly(start: SpawnModel, tmp_path: Path) -> None:
    faults = FaultControl(tmp_path)
    faults.hold("load")
    process = start(executable=FAULTY, environment=faults.environment, ready=False)
    faults.await_held("load")
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == -signal.SIGINT
    quiet(process)


STAND_IN_HOST = """
import os, subprocess, sys
kept = os.dup(1)
runner = subprocess.Popen(
    sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[kept]
)
os.close(kept)
os.write(1, b"spawned\\n")
while chunk := os.read(runner.stdout.fileno(), 65536):
    os.write(1, chunk)
"""
"""Reads the runner's output as a host does and passes it on. The runner also holds a copy of the stand-in's own output,
which therefore ends when both have exited."""


def await_output(process: Process, text: str) -> None:
    """Raises `AssertionError` if the process ends, or a minute passes, before it has written this text."""
    limit = time.monotonic() + 60
    while text not in process.output.text:
        assert process.exit_status is None, process.output.text
        assert time.monotonic() < limit, process.output.text
        time.sleep(0.005)


@contextmanager
def stand_in_host(models_dir: Path, executable: Sequence[str], words: Sequence[str], **env: str) -> Iterator[Process]:
    """Yields a host that can be killed. It counts as exited when its runner has exited too."""
    port = free_port()
    argv = [*executable, *words, "--model", MAIN, "--port", str(port), *CHUNKED]
    variables = {**os.environ, "OLLAMA_MODELS": str(models_dir), **env}
    host = Process([sys.executable, "-c", STAND_IN_HOST, *argv], port, HOST, variables)
    try:
        await_output(host, "spawned")
        yield host
    finally:
        host.send_signal(signal.SIGKILL)
        for pid in pids_with_port(port):
            os.kill(pid, signal.SIGKILL)


@linux_only
@pytest.mark.parametrize("phase", ["idle", "prefill", "queued"])
async def test_the_runner_exits_soon_after_its_host(phase: Phase, models_dir: Path) -> None:
    with stand_in_host(models_dir, RUNNER, ["runner", "--mlx-engine"], OLLAMA_NUM_PARALLEL="1") as host:
        await asyncio.to_thread(host.wait_ready, 60)
        async with busy(host, phase):
            host.send_signal(signal.SIGKILL)
            assert await asyncio.to_thread(host.wait, WAIT_S) is not None
        quiet(host)


@linux_only
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.5])
def test_the_starting_runner_exits_soon_after_its_host(delay_s: float, models_dir: Path, tmp_path: Path) -> None:
    """Early in the start the only sign is that nobody reads the pipe. Loading never ends here."""
    faults = FaultControl(tmp_path)
    faults.hold("load")
    with stand_in_host(models_dir, FAULTY, ["runner"], **faults.environment) as host:
        time.sleep(delay_s)
        host.send_signal(signal.SIGKILL)
        assert host.wait(WAIT_S) is not None
        quiet(host)


@linux_only
async def test_started_by_hand_it_outlives_the_shell(models_dir: Path) -> None:
    with stand_in_host(models_dir, RUNNER, []) as shell:
        await asyncio.to_thread(shell.wait_ready, 60)
        shell.send_signal(signal.SIGKILL)
        assert await asyncio.to_thread(shell.wait, 2.5) is None, "for as long as one with a host would take"
        async with Client.of(shell) as client:
            assert (await client.complete(Request("x"))).text == "yz"
