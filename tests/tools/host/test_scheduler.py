"""The scheduler loads, shares, keeps, evicts and reloads runners as a host does. Shown on the stand-in runner."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from scripts.tools.host.lib import Host, Loaded, LoadError, Process, Request
from tests.tools.host.stand_in import STAND_IN

MakeHost = Callable[..., Host]
SAY = Request("say hey")


@pytest.fixture
async def make_host() -> AsyncIterator[MakeHost]:
    hosts = []

    def make(**arguments: object) -> Host:
        host = Host(**{"executable": STAND_IN, **arguments})  # type: ignore[arg-type]  # as Host's own
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        await host.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def pings(process: Process) -> int:
    return process.output.lines.count("GET /v1/status")


def only(host: Host) -> Loaded:
    (loaded,) = host.loaded
    return loaded


async def test_the_first_request_loads_and_the_next_one_pings_and_shares(make_host: MakeHost) -> None:
    host = make_host()
    first = await host.complete("m:latest", SAY, context=True)
    assert first.text == "hey"
    assert first.context == list(b"say heyhey")
    process = only(host).process
    before = pings(process)
    assert (await host.complete("m:latest", SAY)).text == "hey"
    assert only(host).process is process
    await until(lambda: pings(process) == before + 1)
    assert only(host).status.context_length == 8192
    assert only(host).status.memory > 1000


async def test_a_cancelled_load_is_given_up_and_who_waited_loads_again(make_host: MakeHost) -> None:
    host = make_host(environment={"STAND_IN_SLEEPS": "1.5"})
    first = asyncio.create_task(host.complete("m:latest", SAY))
    await until(lambda: host.loaded)
    process = only(host).process
    second = asyncio.create_task(host.complete("m:latest", SAY))
    await until(lambda: "loading" in process.output.lines)  # an interrupt before that can be lost in an import
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    assert (await second).text == "hey"
    assert only(host).process is not process
    assert process.exit_status == -signal.SIGINT


async def test_a_failed_load_has_the_hosts_text_and_leaves_nothing(make_host: MakeHost) -> None:
    host = make_host(environment={"STAND_IN_FAILS": "no such model"})
    requests = [asyncio.create_task(host.complete("m:latest", SAY)) for _ in range(2)]
    for result in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(result, LoadError)
        assert str(result) == "mlx runner failed: Error: no such model (exit: exit status 1)"
    await until(lambda: not host.loaded)


async def test_the_idle_runner_with_the_shortest_keep_alive_makes_room(make_host: MakeHost) -> None:
    host = make_host(max_loaded=2)
    await host.complete("a:latest", SAY, keep_alive_s=100)
    await host.complete("b:latest", SAY, keep_alive_s=50)
    await host.complete("c:latest", SAY)
    assert [loaded.model for loaded in host.loaded] == ["a:latest", "c:latest"]
    async with host.runner("a:latest"):
        await host.complete("b:latest", SAY)
        assert [loaded.model for loaded in host.loaded] == ["a:latest", "b:latest"], "a is shorter, but not idle"
