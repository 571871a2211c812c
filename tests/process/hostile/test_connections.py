"""Many concurrent connections, more connections than descriptors, and clients that never read."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import Client, spawn
from tests.process.hostile.victim import (
    ANSWER,
    GREETING,
    HOST,
    MODEL,
    PATIENCE_S,
    PLAIN_HEAD,
    Victim,
    completion,
    status_of,
)

CROWD = 1000
STATUS = b"GET /v1/status HTTP/1.1\r\nConnection: close\r\n" + PLAIN_HEAD + b"\r\n"
ENDLESS = completion('{"Prompt":"0","Options":{"num_predict":-1}}')
CONNECTION_BYTES = 32 << 10
"""Memory that one connection of many may leave behind: asyncio and malloc keep pools for connections."""
LEAK_BYTES = 2 << 10
"""Less than any state of a connection that would be left behind each time."""


async def crowd(victim: Victim, sent: bytes) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    connections = []
    for _ in range(CROWD):
        connections.append(await victim.open())
        connections[-1][1].write(sent)
    return connections


async def test_a_thousand_abandoned_completions(victim: Victim) -> None:
    """Storms fill the allocator's pools, the more connections are open at once; then four add nothing to the most that
    was held."""
    highest_bytes = [victim.rss_bytes()]
    for _ in range(10):
        async with victim.storm(2 * CROWD * CONNECTION_BYTES):
            for _, writer in await crowd(victim, ENDLESS):
                writer.transport.abort()
        highest_bytes.append(max(highest_bytes[-1], victim.rss_bytes()))
        if len(highest_bytes) > 4 and highest_bytes[-1] - highest_bytes[-5] < 4 * CROWD * LEAK_BYTES:
            return
    pytest.fail(f"more memory after every storm: {[held >> 20 for held in highest_bytes]} MiB")


async def test_a_client_that_never_reads_delays_nobody_and_loses_nothing(victim: Victim) -> None:
    """Its answer, a kilobyte a token and more than sockets hold, waits in memory."""
    count = 2000
    body = f'{{"Prompt":"0","Options":{{"num_predict":{count}}},"Logprobs":true,"TopLogprobs":20}}'
    async with victim.storm(64 << 20):
        reader, writer = await victim.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # the stream's own transport
        writer.write(completion(body))
        await asyncio.sleep(0.3)
        async with Client.of(victim.process) as client:
            assert (await asyncio.wait_for(client.complete(GREETING), 300)).text == ANSWER
        writer.transport.resume_reading()  # type: ignore[attr-defined]  # the stream's own transport
        answer = await asyncio.wait_for(reader.read(), 300)
        writer.close()
    lines = [json.loads(line) for line in answer.splitlines() if line.startswith(b"{")]
    assert lines[-1]["EvalCount"] == count
    assert "".join(line["Content"] for line in lines) == "1234567890" * (count // 10)


@pytest.fixture
def poor(victim_store: Path) -> Iterator[Victim]:
    """Yields a process that can never have more than 64 descriptors."""
    limited = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *RUNNER]
    with spawn(limited, MODEL, models_dir=victim_store, generation=HOST) as process:
        process.wait_ready(60)
        yield Victim(process)


async def test_with_few_descriptors_the_longest_idle_connections_are_closed(poor: Victim) -> None:
    async with poor.storm() as polls:
        connections = []
        for _ in range(25):  # lest 25 connections come while a poll has its own, but has not sent its request
            connections += [await poor.open() for _ in range(8)]
            seen = len(polls)
            while len(polls) == seen:
                await asyncio.sleep(0.001)
        assert await poor.exchange(STATUS)
        async with Client.of(poor.process) as client:
            answer = await asyncio.wait_for(client.complete(GREETING), PATIENCE_S)
        assert answer.text == ANSWER
        assert poor.descriptors() < 64
        closed = await asyncio.gather(*(_is_closed(reader) for reader, _ in connections))
        assert closed == sorted(closed, reverse=True), "the first ones that came"
        assert 100 < sum(closed) < 200
        for _, writer in connections:
            writer.transport.abort()


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), 2) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_while_all_connections_are_busy_a_status_is_answered_and_others_refused(poor: Victim) -> None:
    """Bodies that never arrive keep all connections busy; further clients get an error."""
    waiting = b"POST /completion HTTP/1.1\r\nContent-Length: 100\r\n" + PLAIN_HEAD + b"\r\n{"
    connections = []
    for _ in range(60):
        connections.append(await poor.open())
        connections[-1][1].write(waiting)
        await asyncio.sleep(0.01)
    assert status_of(await poor.exchange(STATUS)) == 200
    refused = await poor.exchange(completion('{"Prompt":"Hi"}'))
    assert status_of(refused) == 503
    assert b"connections are busy" in refused
    for _, writer in connections:
        writer.transport.abort()
    async with Client.of(poor.process) as client:
        assert (await asyncio.wait_for(client.complete(GREETING), PATIENCE_S)).text == ANSWER
    poor.check_output(poor.process.output.text)
