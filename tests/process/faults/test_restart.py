"""Runners that are killed, stopped and restarted on the same port leave nothing behind; the next answer is right."""

import asyncio
import os
import signal
import socket

import pytest

from scripts.tools.conformance.assertions import ALPHABET
from scripts.tools.host.lib import Client, Process, Request, free_port
from tests.process.conftest import CHUNKED, FAULTY, SpawnModel
from tests.process.faults.fault_control import FaultControl

ADVICE = "; choose another --port, or 0 for a free one"


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
        response = await client.post_completion(Request("0"))
        await response.content.readline()
        process.kill()
        response.close()


async def test_it_restarts_on_the_same_port_after_a_kill(
    start: SpawnModel, faults: FaultControl, tmp_path_factory: pytest.TempPathFactory
) -> None:
    port, empty = free_port(), tmp_path_factory.mktemp("empty")
    environment = {**faults.environment, "TMPDIR": str(empty)}
    for phase in ("loading", "decode", "last"):
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
        assert await asyncio.to_thread(process.wait, 60) == 1
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
        assert (await asyncio.wait_for(health, 60)).memory > 0
        assert (await asyncio.wait_for(answer, 60)).text == "1234567890" * 100
        assert (await asyncio.wait_for(prompt, 60)).final.prompt_eval_count == 3000
        assert (await client.complete(Request("Hi"))).text == ALPHABET
    assert not process.output.captured
