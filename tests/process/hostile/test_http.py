"""Malformed and unusual HTTP gets an answer or a closed connection, and other clients are not affected."""

import asyncio
import re

import pytest

from tests.process.hostile.victim import PATIENCE_S, PLAIN_HEAD, Victim, post, status_of

GREET = b'{"Prompt":"Hi"}'
ENDLESS = b'{"Prompt":"0","Options":{"num_predict":-1}}'
GET = b"GET /v1/status HTTP/1.1\r\n"
POST = b"POST /completion HTTP/1.1\r\n" + PLAIN_HEAD
CLOSE = b"Connection: close\r\n"

REFUSED = {
    "HTTP/0.9": b"GET /v1/status\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "NUL in the target": b"GET /v1/st\0atus HTTP/1.1\r\n" + PLAIN_HEAD + b"\r\n",
    "a method of 10,000 letters": b"G" * 10000 + b" / HTTP/1.1\r\n\r\n",
    "a target of 100,000 characters": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + PLAIN_HEAD + b"\r\n",
    "a header of 100,000 characters": GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "10,000 headers": GET + b"X: y\r\n" * 10_000 + b"\r\n",
    "two lengths": POST + b"Content-Length: 15\r\nContent-Length: 3\r\n\r\n" + GREET,
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a length and chunks": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "a chunk size that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "a chunk longer than its size": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "an expectation of nobody": POST + CLOSE + b"Expect: the-inquisition\r\nContent-Length: 15\r\n\r\n" + GREET,
    "a body that is compressed": post("/completion", b"abc", b"Content-Encoding: gzip\r\n"),
    "a foreign host": GET + CLOSE + b"Host: \xff\xfe:1\r\n\r\n",
    "multipart": post(
        "/completion",
        b'--x\r\nContent-Disposition: form-data; name="Prompt"\r\n\r\nHi\r\n--x--',
        b"Content-Type: multipart/form-data; boundary=x\r\n",
    ),
}

ANSWERED = {
    "an absolute target": b"GET http://127.0.0.1/v1/status HTTP/1.1\r\n" + PLAIN_HEAD + CLOSE + b"\r\n",
    "an upgrade": GET + PLAIN_HEAD + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
    "an escaped path": b"GET /v1/%73tatus HTTP/1.1\r\n" + PLAIN_HEAD + CLOSE + b"\r\n",
    "a query": b"GET /v1/status?%00=%ff&x=" + b"y" * 1000 + b" HTTP/1.1\r\n" + PLAIN_HEAD + CLOSE + b"\r\n",
    "an awaited body": POST + CLOSE + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n" + GREET,
    "chunks with extensions": POST + CLOSE + b"Transfer-Encoding: chunked\r\n\r\nf;a=b\r\n" + GREET + b"\r\n0\r\n\r\n",
}


async def test_invalid_requests_are_refused_or_cut_off_and_leave_no_trace(victim: Victim) -> None:
    async with victim.storm():
        answers = await asyncio.gather(*[victim.exchange(data, half_close=True) for data in REFUSED.values()])
    for name, answer in zip(REFUSED, answers, strict=True):
        assert status_of(answer) in {0, *range(400, 500)}, name


@pytest.mark.parametrize("name", ANSWERED)
async def test_unusual_but_valid_requests_are_answered(name: str, victim: Victim) -> None:
    answer = await victim.exchange(ANSWERED[name])
    assert status_of(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")) == 200, answer[:200]


async def test_slow_clients_do_not_delay_others(victim: Victim) -> None:
    """Two hundred clients send heads and bodies a byte at a time, or bodies that never end."""
    heads = [
        GET + b"X: ",
        POST + b"Content-Length: 1000000\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ]
    async with victim.storm():
        connections = [await victim.open() for _ in range(200)]
        for number, (_, writer) in enumerate(connections):
            writer.write(heads[number % 3])
        for _ in range(10):
            await asyncio.sleep(0.05)
            for number, (_, writer) in enumerate(connections):
                writer.write(b"1\r\n \r\n" if number % 3 == 2 else b" ")
        for _, writer in connections:
            writer.transport.abort()


async def test_pipelined_requests_are_answered_one_after_the_other(victim: Victim) -> None:
    whole = POST + b"Content-Length: 15\r\n\r\n" + GREET
    status = GET + PLAIN_HEAD
    async with victim.storm():
        nope = b"GET /nope HTTP/1.1\r\n" + PLAIN_HEAD + b"\r\n"
        answer = await victim.exchange(whole + status + b"\r\n" + whole + nope + status + CLOSE + b"\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200", b"200", b"404", b"200"]


async def test_an_abort_behind_pipelined_requests_cancels_all_of_them(victim: Victim) -> None:
    request = POST + f"Content-Length: {len(ENDLESS)}\r\n\r\n".encode() + ENDLESS
    async with victim.storm():
        reader, writer = await victim.open()
        writer.write(request * 40 + GET + b"\r\n")
        await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.transport.abort()
