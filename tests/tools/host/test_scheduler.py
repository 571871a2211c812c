"""The scheduler loads, shares, keeps, evicts and reloads runners as a host does. Shown on the stand-in runner."""

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from scripts.tools.host.lib import Host, Loaded, LoadError, Process, Request, StreamError
from scripts.tools.host.lib.output import SCANNED
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


async def test_requests_at_once_share_one_load_and_run_at_the_same_time(make_host: MakeHost) -> None:
    host = make_host(environment={"STAND_IN_SLEEPS": "0.3"})
    requests = [asyncio.create_task(host.complete("m:latest", SAY)) for _ in range(5)]
    await until(lambda: host.loaded)
    process = only(host).process
    assert [completion.text for completion in await asyncio.gather(*requests)] == ["hey"] * 5
    assert only(host).process is process
    assert only(host).users == 0


async def test_a_cancelled_load_is_given_up_and_who_waited_loads_again(make_host: MakeHost) -> None:
    host = make_host(environment={"STAND_IN_SLEEPS": "1.5"})
    first = asyncio.create_task(host.complete("m:latest", SAY))
    await until(lambda: host.loaded)
    process = only(host).process
    second = asyncio.create_task(host.complete("m:latest", SAY))
    await asyncio.sleep(0.05)
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


async def test_a_runner_that_answers_no_ping_is_closed_and_loaded_again(make_host: MakeHost) -> None:
    host = make_host()
    await host.complete("m:latest", Request("deaf"))
    process = only(host).process
    assert (await host.complete("m:latest", SAY)).text == "hey"
    assert only(host).process is not process
    assert process.exit_status == -signal.SIGINT


async def test_keep_alive_is_per_request_zero_unloads_and_infinite_stays(make_host: MakeHost) -> None:
    host = make_host(keep_alive_s=math.inf)
    await host.complete("m:latest", SAY)
    assert only(host).expires_at == math.inf
    await host.complete("m:latest", SAY, keep_alive_s=60)
    assert time.time() + 50 < only(host).expires_at < time.time() + 70
    await host.complete("m:latest", SAY)
    assert only(host).keep_alive_s == 60, "a request that names none changes nothing"
    process = only(host).process
    await host.complete("m:latest", SAY, keep_alive_s=0)
    await until(lambda: not host.loaded)
    assert process.exit_status == -signal.SIGINT


async def test_an_idle_runner_goes_after_its_keep_alive_and_a_request_starts_it_anew(make_host: MakeHost) -> None:
    host = make_host(keep_alive_s=0.2)
    async with host.runner("m:latest") as loaded:
        await asyncio.sleep(0.3)
        assert not loaded.closing, "the time runs while it is idle only"
    async with host.runner("m:latest") as again:
        await asyncio.sleep(0.3)
        assert again is loaded
        assert (loaded.closing, loaded.keep_alive_s) == (False, 0.2), "and a request stops it"
    await until(lambda: not host.loaded)
    assert loaded.process.exit_status == -signal.SIGINT


async def test_the_idle_runner_with_the_shortest_keep_alive_makes_room(make_host: MakeHost) -> None:
    host = make_host(max_loaded=2)
    await host.complete("a:latest", SAY, keep_alive_s=100)
    await host.complete("b:latest", SAY, keep_alive_s=50)
    await host.complete("c:latest", SAY)
    assert [loaded.model for loaded in host.loaded] == ["a:latest", "c:latest"]
    async with host.runner("a:latest"):
        await host.complete("b:latest", SAY)
        assert [loaded.model for loaded in host.loaded] == ["a:latest", "b:latest"], "a is shorter, but not idle"


async def test_requests_pass_by_the_model_that_waits_and_their_keep_alive_holds(make_host: MakeHost) -> None:
    """As in Ollama: the fast path of its getRunner, and useLoadedRunner, which sets the duration anew."""
    host = make_host(max_loaded=1)
    async with host.runner("a:latest") as loaded:
        waiting = asyncio.create_task(host.complete("b:latest", SAY))
        await until(lambda: loaded.keep_alive_s == 0)
        third = asyncio.create_task(host.complete("c:latest", SAY))
        assert (await host.complete("a:latest", SAY, keep_alive_s=2)).text == "hey"
    assert (loaded.users, loaded.closing) == (0, False)
    assert time.time() + 1 < loaded.expires_at < time.time() + 3
    assert (await host.complete("a:latest", SAY)).text == "hey"
    assert [each.model for each in host.loaded] == ["a:latest"]
    assert [completion.text for completion in await asyncio.gather(waiting, third)] == ["hey"] * 2
    assert only(host).model == "c:latest"


async def test_closing_ends_every_runner_whatever_it_does(make_host: MakeHost) -> None:
    host = make_host(rule=SCANNED)
    await host.complete("a:latest", SAY)
    holding = asyncio.create_task(host.complete("b:latest", Request("hold on")))
    await until(lambda: len(host.loaded) == 2 and "hold on" in host.loaded[1].process.output.text)
    processes = [loaded.process for loaded in host.loaded]
    await host.close()
    assert host.loaded == []
    assert [process.exit_status for process in processes] == [-signal.SIGINT] * 2
    with pytest.raises(StreamError, match=r"unexpected EOF|connection reset"):
        await holding
