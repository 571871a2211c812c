"""The exit of the process, beyond the conformance cases 9-11: in every phase, on SIGTERM, after the host's death."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

from scripts.tools.conformance.assertions import generating, quiet
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Process, Request, StreamError, free_port
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store
from tests.lib.patience import stretched
from tests.model.loading.malformed import entry, file_start, sparse, with_config
from tests.process.conftest import CHUNK_TOKENS, FAULTY, HOST, MAIN, RUNNER, SpawnModel
from tests.process.faults.fault_control import FaultControl

Phase = Literal["idle", "prefill", "decode", "queued"]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PHASES: tuple[Phase, ...] = ("idle", "prefill", "decode", "queued")
CHUNKED = ["--prefill-chunk", str(CHUNK_TOKENS)]
LONG_PROMPT = "y" * (CONTEXT - 10)


@asynccontextmanager
async def busy(process: Process, phase: Phase) -> AsyncIterator[None]:
    """Keeps the process in that phase inside the block; its exit may break the requests that keep it there."""
    async with Client.of(process) as client:
        tasks: list[asyncio.Task[object]] = []
        if phase == "prefill":
            tasks.append(asyncio.create_task(client.complete(Request(LONG_PROMPT))))
            await asyncio.sleep(0.4)
        elif phase in ("decode", "queued"):
            async with generating(client):
                if phase == "queued":
                    tasks.append(asyncio.create_task(client.complete(Request("Hi"))))
                    await asyncio.sleep(0.1)
                yield
        if phase in ("idle", "prefill"):
            yield
        for task in tasks:
            with pytest.raises(StreamError):
                await asyncio.wait_for(task, 30)


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
    [*((phase, signal.SIGTERM) for phase in PHASES), ("prefill", signal.SIGINT), ("queued", signal.SIGINT)],
)
async def test_a_signal_ends_it_quietly_within_a_second(
    phase: Phase, number: signal.Signals, start: SpawnModel
) -> None:
    process = start(arguments=[*CHUNKED, "--parallel", "1"])
    async with busy(process, phase):
        process.send_signal(number)
        assert await asyncio.to_thread(process.wait, stretched(1.0)) == -number
    quiet(process)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_starting_ends_it_within_a_second(
    delay_s: float, number: signal.Signals, start: SpawnModel
) -> None:
    process = start(ready=False)
    if number is signal.SIGINT:
        await_our_code(process)
    time.sleep(delay_s)
    process.send_signal(number)
    assert process.wait(stretched(1.0)) == -number
    quiet(process)


def await_our_code(process: Process) -> None:
    """Waits until Python's own start is over: in its first 20 ms SIGINT may print a traceback or be lost."""
    if not Path("/proc/self").exists():
        time.sleep(0.1)
        return
    was_caught, free_polls = False, 0
    for _ in range(1000):
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored, caught = (int(re.findall(rf"{name}:\t(\w+)", status)[0], 16) for name in ("SigIgn", "SigCgt"))
        if caught >> (signal.SIGINT - 1) & 1:
            was_caught = True
        elif was_caught:
            return
        elif ignored >> (signal.SIGPIPE - 1) & 1:  # Python is past the moment in which it takes both
            free_polls += 1
            if free_polls == 50:
                return
        time.sleep(0.002)
    raise AssertionError("the runner never got to its first line")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_loading_ends_it_quietly_within_a_second(
    number: signal.Signals, start: SpawnModel, tmp_path: Path
) -> None:
    faults = FaultControl(tmp_path)
    faults.hold("load")
    process = start(executable=FAULTY, environment=faults.environment, ready=False)
    faults.await_held("load")
    process.send_signal(number)
    assert process.wait(stretched(1.0)) == -number
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
@pytest.mark.parametrize("phase", PHASES)
async def test_the_runner_exits_within_two_seconds_of_its_host(phase: Phase, models_dir: Path) -> None:
    with stand_in_host(models_dir, RUNNER, ["runner", "--mlx-engine"], OLLAMA_NUM_PARALLEL="1") as host:
        await asyncio.to_thread(host.wait_ready, 60)
        async with busy(host, phase):
            host.send_signal(signal.SIGKILL)
            assert await asyncio.to_thread(host.wait, stretched(2.0)) is not None
        quiet(host)


@linux_only
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 1.5])
def test_the_starting_runner_exits_within_two_seconds_of_its_host(delay_s: float, models_dir: Path) -> None:
    """Early in the start the only sign is that nobody reads the pipe."""
    with stand_in_host(models_dir, FAULTY, ["runner"], FAULT="slow-load") as host:
        time.sleep(delay_s)
        host.send_signal(signal.SIGKILL)
        assert host.wait(stretched(2.0 if delay_s else 3.0)) is not None, "its own start is not counted"
        quiet(host)


@linux_only
def test_the_verifying_runner_exits_within_two_seconds_of_its_host(tmp_path: Path) -> None:
    """Hashing a sparse embedding of 32 GiB takes much longer than two seconds."""
    store = write_store(tmp_path / "models", MAIN, write_checkpoint(tmp_path / "source", "llama"))
    store.drop("lm_head.weight")
    with_config(vocab_size=1 << 27, tie_word_embeddings=True)(store)
    name, size_bytes = "model.embed_tokens.weight", 1 << 35
    start = file_start({name: entry(shape=(1 << 27, 64), offsets=(0, size_bytes))})
    sparse(name, len(start) + size_bytes, start)(store)
    with stand_in_host(store.models_dir, RUNNER, ["runner"], MLX_RUNNER_VERIFY="on") as host:
        await_output(host, "msg=verifying")
        host.send_signal(signal.SIGKILL)
        assert host.wait(2.0) is not None
        quiet(host)


@linux_only
async def test_started_by_hand_it_outlives_the_shell(models_dir: Path) -> None:
    with stand_in_host(models_dir, RUNNER, []) as shell:
        await asyncio.to_thread(shell.wait_ready, 60)
        shell.send_signal(signal.SIGKILL)
        assert await asyncio.to_thread(shell.wait, 2.5) is None
        async with Client.of(shell) as client:
            assert (await client.complete(Request("x"))).text == "yz"
