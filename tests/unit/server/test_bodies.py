"""The limits of bodies, and the refusal of compressed ones."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from runner.engine.ports import NoVision
from runner.errors import RequestError
from runner.server import intake
from runner.server.intake import Incoming, Intake

Client = TestClient[web.Request, web.Application]
MOST = 1000
HELD = web.AppKey("held", Intake)
GO_ON = web.AppKey("go_on", asyncio.Event)


@pytest.fixture
async def client(aiohttp_client: Callable[..., Awaitable[Client]]) -> Client:
    """Of a server that answers with what it has read, of `/kept` as soon as it is told to."""

    async def echo(http: web.Request) -> web.Response:
        held, body = http.app[HELD], bytearray()

        def take(piece: bytes) -> int:
            body.extend(piece)
            return len(body) if http.path == "/kept" else 0

        try:
            with Incoming(held, NoVision()) as reading:
                await reading.read_body(
                    http, 1 << 30 if http.path == "/kept" else int(http.query.get("most", MOST)), take
                )
                if http.path == "/kept":
                    await http.app[GO_ON].wait()
        except RequestError as error:
            return web.Response(status=error.status, text=str(error))
        return web.Response(body=bytes(body))

    app = web.Application(handler_args={"auto_decompress": False})
    app[HELD], app[GO_ON] = Intake(1000), asyncio.Event()
    app.router.add_post("/", echo)
    app.router.add_post("/kept", echo)
    return await aiohttp_client(TestServer(app))


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (b"Content-Length: 1001\r\n\r\n", b"413", b"has 1001 bytes or more; the limit is 1000"),
        (b"Transfer-Encoding: chunked\r\n\r\n" + (b"64\r\n" + bytes(100) + b"\r\n") * 11, b"413", b"limit is 1000"),
        (b"Content-Length: 100\r\n\r\nabc", b"408", b"the request has stalled"),
    ],
    ids=["too large by its header", "without end", "stalled"],
)
async def test_a_body_is_refused_before_all_of_it_has_arrived(
    sent: bytes, status: bytes, text: bytes, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_STALLED_S", 0.1)
    assert (await client.post("/", data=bytes(MOST))).status == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + sent)
    answer = await asyncio.wait_for(reader.readuntil(text), 30)
    writer.close()
    assert answer.split()[1] == status


async def test_a_body_may_use_the_bytes_that_others_leave_free(client: Client) -> None:
    """Of 1000 bytes, of which each may take as many as are left then."""
    server = client.app
    assert server is not None
    kept = []
    for size, held in ((500, 500), (251, 500), (250, 750), (125, 875), (1, 876)):
        posted = asyncio.create_task(client.post("/kept", data=bytes(size)))
        if held == 500 and size == 251:
            refused = await asyncio.wait_for(posted, 30)
            assert refused.status == 503
            assert "in a moment" in await refused.text()
        else:
            kept.append(posted)
        async with asyncio.timeout(5):
            while server[HELD].held_bytes != held:
                await asyncio.sleep(0.001)
    server[GO_ON].set()
    answers = [await asyncio.wait_for(posted, 30) for posted in kept]
    assert [answer.status for answer in answers] == [200] * 4
    assert server[HELD].held_bytes == 0


async def test_reading_a_body_yields_to_other_tasks(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps makes each piece a turn; another task counts the turns of the event loop meanwhile."""
    clock: Iterator[float] = iter(range(1_000_000))
    monkeypatch.setattr(intake, "perf_counter", lambda: next(clock))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    body = json.dumps("x" * (1 << 20)).encode()
    assert (await client.post("/?most=9999999", data=body)).status == 200
    counting.cancel()
    assert turns > len(body) // intake._PIECE_BYTES
