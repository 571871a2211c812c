"""The scheduler loads, shares, keeps, evicts and reloads runners as a host does. Shown on the stand-in runner."""

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from scripts.tools.host.lib import A, F, Host, Loaded, LoadError, Process, Request, StatusError, StreamError
from scripts.tools.host.lib.output import SCANNED
from tests.tools.host.conftest import STAND_IN

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


async def test_an_early_host_finishes_a_load_whose_request_has_gone(make_host: MakeHost) -> None:
    host = make_host(generation=A, environment={"STAND_IN_SLEEPS": "0.3"})
    first = asyncio.create_task(host.complete("m:latest", SAY))
    await until(lambda: host.loaded)
    process = only(host).process
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    await until(only(host).settled.is_set)
    await until(lambda: only(host).users == 0)
    await host.complete("m:latest", SAY)
    assert only(host).process is process


async def test_a_failed_load_has_the_hosts_text_and_leaves_nothing(make_host: MakeHost) -> None:
    host = make_host(environment={"STAND_IN_FAILS": "no such model"})
    requests = [asyncio.create_task(host.complete("m:latest", SAY)) for _ in range(2)]
    for result in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(result, LoadError)
        assert str(result) == "mlx runner failed: Error: no such model (exit: exit status 1)"
    await until(lambda: not host.loaded)


async def test_an_executable_that_is_not_there_is_a_failed_load(make_host: MakeHost) -> None:
    host = make_host(executable=["/nowhere/runner"])
    with pytest.raises(LoadError, match="failed to start mlx runner: fork/exec /nowhere/runner: no such file or dir"):
        await host.complete("m:latest", SAY)
    assert host.loaded == []


async def test_a_load_that_takes_too_long_is_ended(make_host: MakeHost) -> None:
    host = make_host(environment={"STAND_IN_SLEEPS": "60"}, load_timeout_s=0.2)
    with pytest.raises(LoadError, match="timeout waiting for mlx runner to start"):
        await host.complete("m:latest", SAY)
    await until(lambda: not host.loaded)


async def test_a_runner_that_answers_no_ping_is_closed_and_loaded_again(make_host: MakeHost) -> None:
    host = make_host()
    await host.complete("m:latest", Request("deaf"))
    process = only(host).process
    assert (await host.complete("m:latest", SAY)).text == "hey"
    assert only(host).process is not process
    assert process.exit_status == -signal.SIGINT


async def test_a_dead_runner_is_loaded_again(make_host: MakeHost) -> None:
    host = make_host()
    await host.complete("m:latest", SAY)
    process = only(host).process
    os.kill(process.pid, signal.SIGKILL)
    assert (await host.complete("m:latest", SAY)).text == "hey"
    assert only(host).process is not process


async def test_a_deaf_runner_is_closed_only_after_its_requests(make_host: MakeHost) -> None:
    host = make_host()
    async with host.runner("m:latest") as loaded, loaded.client.stream(Request("hold on")) as stream:
        async for _ in stream:
            break
        await host.complete("m:latest", Request("deaf"))
        waiting = asyncio.create_task(host.complete("m:latest", SAY))
        await asyncio.sleep(0.2)
        assert loaded.process.exit_status is None
        assert not waiting.done()
    assert (await waiting).text == "hey"
    assert only(host) is not loaded


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


async def test_without_an_idle_runner_the_next_model_waits_for_a_request_to_end(make_host: MakeHost) -> None:
    host = make_host(max_loaded=1)
    async with host.runner("a:latest") as loaded:
        waiting = asyncio.create_task(host.complete("b:latest", SAY))
        await asyncio.sleep(0.2)
        assert only(host) is loaded
    assert (await waiting).text == "hey"
    assert only(host).model == "b:latest"


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


async def test_a_loaded_runner_that_ends_by_itself_is_reported(make_host: MakeHost) -> None:
    lines: list[str] = []
    host = make_host(report=lines.append)
    await host.complete("idle:latest", SAY)
    os.kill(only(host).process.pid, signal.SIGKILL)
    await until(lambda: lines)
    with suppress(StreamError):
        async with host.runner("busy:latest", keep_alive_s=0) as busy, busy.client.stream(Request("hold on")) as stream:
            async for _ in stream:
                os.kill(busy.process.pid, signal.SIGSEGV)
                await until(lambda: busy.process.exit_status is not None)  # before the host ends it for being idle
                break  # what was written before may still arrive when nobody of that number is left
    await until(lambda: len(lines) == 2)
    await host.complete("idle:latest", SAY, keep_alive_s=0)
    await until(lambda: not host.loaded)
    await host.complete("idle:latest", SAY)
    await host.close()
    failing = make_host(report=lines.append, environment={"STAND_IN_FAILS": "no"})
    with pytest.raises(LoadError):
        await failing.complete("m:latest", SAY)
    await asyncio.sleep(0.1)
    assert lines == ["runner of idle:latest: signal: killed", "runner of busy:latest: signal: segmentation fault"]


async def test_an_error_that_speaks_of_memory_unloads_every_model(make_host: MakeHost) -> None:
    host = make_host()
    await host.complete("a:latest", SAY)
    with pytest.raises(StatusError, match="Out Of Memory"):
        await host.complete("b:latest", Request("oom"))
    await until(lambda: not host.loaded)


async def test_another_error_unloads_nothing_and_early_hosts_read_no_memory_into_texts(make_host: MakeHost) -> None:
    host = make_host()
    with pytest.raises(StatusError, match="what"):
        await host.complete("a:latest", Request("huh"))
    assert not only(host).closing
    early = make_host(generation=A)
    with pytest.raises(StatusError, match="Out Of Memory"):
        await early.complete("a:latest", Request("oom"))
    assert not only(early).closing


async def test_a_cancelled_request_closes_its_connection_and_the_runner_stays(make_host: MakeHost) -> None:
    host = make_host()
    await host.complete("m:latest", SAY)
    request = asyncio.create_task(host.complete("m:latest", Request("hold it")))
    process = only(host).process
    await until(lambda: '"prompt": "hold it"' in process.output.text)
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request
    await until(lambda: "gone it" in process.output.lines)
    assert only(host).users == 0
    assert (await host.complete("m:latest", SAY)).text == "hey"


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


async def test_the_context_is_the_smaller_of_the_models_and_the_users(make_host: MakeHost) -> None:
    host = make_host(generation=F)
    async with host.runner("a:latest", num_ctx=4096) as small, host.runner("b:latest", num_ctx=10**6) as large:
        assert (small.context_length, large.context_length) == (4096, 8192)
        assert await small.memory() > 1000
        os.kill(small.process.pid, signal.SIGKILL)
        assert await small.memory() > 1000, "the last known"
