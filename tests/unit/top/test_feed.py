"""`mlx-runner top` reads a runner, or says why it cannot."""

import asyncio
import socket

import pytest
from msgspec.structs import replace

from runner.errors import RunnerError
from runner.numbers.top import StatsFeed
from tests.lib.page_stand_in import STATS, StandIn


async def test_every_change_is_read_until_the_end() -> None:
    async with StandIn() as stand_in:
        stand_in.show()  # other events are passed over
        follow = StatsFeed(stand_in.url).follow()
        for model in ("first", "second"):
            stand_in.tell(replace(STATS, model=model))
            assert (await asyncio.to_thread(next, follow)).model == model
        await stand_in.end()
        with pytest.raises(RunnerError, match=rf"the runner on 127.0.0.1:{stand_in.port} has ended|no answer from"):
            await asyncio.to_thread(next, follow)


def test_a_port_without_a_listener_is_reported_with_advice() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        feed = StatsFeed(f"http://127.0.0.1:{port}")
        for read in (feed.stats, lambda: next(feed.follow())):
            with pytest.raises(RunnerError, match=rf"nothing listens on 127.0.0.1:{port}: start the runner, or give"):
                read()


@pytest.mark.parametrize(
    ("bytes_told", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", r"is not a runner .*it answers 404 to GET /v1/stats"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n<p", r"is not a runner .*its numbers have another form"),
        (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", r"is not a runner .*it does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", r"no answer from .*is the runner still running"),
        (b"", r"no answer from .*is the runner still running"),
    ],
)
async def test_a_server_that_is_no_runner_is_reported(bytes_told: bytes, said: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes_told)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RunnerError, match=said):
            await asyncio.to_thread(StatsFeed(f"http://127.0.0.1:{port}").stats)


async def test_a_server_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.numbers.top._PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        feed = StatsFeed(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(RunnerError, match=r"does not answer: look at its log, or end it"):
            await asyncio.to_thread(feed.stats)
