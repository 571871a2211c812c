"""Runners that are killed, stopped and restarted on the same port leave nothing behind; the next answer is right."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Process, Request, free_port
from tests.lib.patience import stretched
from tests.process.conftest import CHUNK_TOKENS, FAULTY, SpawnModel
from tests.process.faults.fault_control import FaultControl

ALPHABET = "jklmnopqrstuvwxyz"
CHUNKED = ["--prefill-chunk", str(CHUNK_TOKENS)]
PHASES = ("loading", "prefill", "decode", "idle")
ADVICE = "; choose another --port, or 0 for a free one"
_TIME_WAIT = "06"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def states_of(port: int) -> set[str]:
    """Returns the kernel's state numbers of TCP connections with this local port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[3] for row in rows if int(row[1].split(":")[1], 16) == port}


async def kill_while(phase: str, process: Process, faults: FaultControl) -> None:
    """Kills the process with SIGKILL in that phase, as hosts since September 2026 do."""
    if phase == "loading":
        await asyncio.to_thread(faults.await_held, "load")
        process.kill()
        faults.release("load")
        return
    await asyncio.to_thread(process.wait_ready, 60)
    async with Client.of(process) as client:
        assert (await client.complete(Request("Hi"))).text == ALPHABET
        prompt = {"prefill": "q" * (CONTEXT - 100), "decode": "0", "idle": "w"}[phase]
        response = await client.post_completion(Request(prompt))
        if phase != "prefill":
            await response.content.readline()
        process.kill()
        response.close()


async def killed_and_started(phases: tuple[str, ...], start: SpawnModel, faults: FaultControl, empty: Path) -> None:
    port = free_port()
    environment = {**faults.environment, "TMPDIR": str(empty)}
    for phase in (*phases, "last"):
        if phase == "loading":
            faults.hold("load")
        process = start(executable=FAULTY, port=port, environment=environment, arguments=CHUNKED, ready=False)
        if phase != "last":
            await kill_while(phase, process, faults)
            assert process.exit_status == -signal.SIGKILL, "no other process holds its pipe"
            assert not process.output.captured
    await asyncio.to_thread(process.wait_ready, 60)
    async with Client.of(process) as client:
        assert (await client.complete(Request("Hi"))).text == ALPHABET
    assert not os.listdir(empty)  # noqa: PTH208 - not a wait worth a thread


async def test_it_restarts_on_the_same_port_after_a_kill(
    start: SpawnModel, faults: FaultControl, tmp_path_factory: pytest.TempPathFactory
) -> None:
    await killed_and_started(("loading", "decode"), start, faults, tmp_path_factory.mktemp("empty"))


@pytest.mark.slow
async def test_it_restarts_after_twenty_kills_in_all_phases(
    start: SpawnModel, faults: FaultControl, tmp_path_factory: pytest.TempPathFactory
) -> None:
    await killed_and_started(PHASES * 5, start, faults, tmp_path_factory.mktemp("empty"))


@linux_only
async def test_connections_of_a_killed_runner_do_not_block_the_port(start: SpawnModel) -> None:
    """The runner closes first, so its end of the connection stays in TIME_WAIT for a minute."""
    process = start()
    with socket.create_connection(("127.0.0.1", process.port)) as client:
        client.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536)
        process.kill()
        assert client.recv(65536) == b""
    assert _TIME_WAIT in states_of(process.port)
    again = start(port=process.port)
    async with Client.of(again) as runner:
        assert (await runner.complete(Request("Hi"))).text == ALPHABET


async def test_a_port_that_was_taken_can_be_served_once_it_is_free(start: SpawnModel) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]  # bound but not listening, as when a host probes for a free port
        refused = start(port=port, ready=False)
        assert await asyncio.to_thread(refused.wait, 20) == 1
        assert refused.output.captured == f"Error: listen tcp 127.0.0.1:{port}: bind: address already in use{ADVICE}"
    async with Client.of(start(port=port)) as client:
        assert (await client.complete(Request("Hi"))).text == ALPHABET


async def test_a_port_taken_during_loading_is_reported_in_one_line(start: SpawnModel, faults: FaultControl) -> None:
    """With SO_REUSEADDR the kernel lets two sockets bind as long as neither listens."""
    faults.hold("load")
    process = start(executable=FAULTY, environment=faults.environment, ready=False)
    await asyncio.to_thread(faults.await_held, "load")
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", process.port))
        thief.listen()
        faults.release("load")
        assert await asyncio.to_thread(process.wait, 20) == 1
    told = f"Error: listen tcp 127.0.0.1:{process.port}: bind: address already in use"
    assert process.output.captured == told + ADVICE


async def test_it_continues_after_a_stop_of_seconds(start: SpawnModel) -> None:
    """As when a laptop sleeps, a debugger attaches or a container is frozen."""
    process = start(arguments=CHUNKED)
    async with Client.of(process) as client:
        answer = asyncio.create_task(client.complete(Request("0", {"num_predict": 1000})))
        prompt = asyncio.create_task(client.complete(Request("q" * 3000, {"num_predict": 1})))
        await asyncio.sleep(0.1)
        os.kill(process.pid, signal.SIGSTOP)
        health = asyncio.create_task(client.status())
        await asyncio.sleep(2)
        assert not health.done(), "the process is stopped"
        os.kill(process.pid, signal.SIGCONT)
        assert (await asyncio.wait_for(health, 10)).memory > 0
        assert (await asyncio.wait_for(answer, 60)).text == "1234567890" * 100
        assert (await asyncio.wait_for(prompt, 60)).final.prompt_eval_count == 3000
        assert (await client.complete(Request("Hi"))).text == ALPHABET
    assert not process.output.captured
    started = time.monotonic()
    process.close()
    assert time.monotonic() - started < stretched(4)
