"""Malformed and unusual HTTP gets an answer or a closed connection, and other clients are not affected."""

import asyncio
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.process.hostile.victim import ANSWER, PLAIN_HEAD, Victim, completion, post, status_of

GREET = '{"Prompt":"Hi"}'
ENDLESS = '{"Prompt":"0","Options":{"num_predict":-1}}'
GET = b"GET /v1/status HTTP/1.1\r\n"
POST = b"POST /completion HTTP/1.1\r\n" + PLAIN_HEAD
CLOSE = b"Connection: close\r\n"

REFUSED = {
    "HTTP/0.9": b"GET /v1/status\r\n\r\n",
    "HTTP/9.9": b"GET /v1/status HTTP/9.9\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "NUL in the target": b"GET /v1/st\0atus HTTP/1.1\r\n" + PLAIN_HEAD + b"\r\n",
    "NUL in a value": GET + PLAIN_HEAD + b"X: a\0b\r\n\r\n",
    "no method": b" /v1/status HTTP/1.1\r\n\r\n",
    "a method of 10,000 letters": b"G" * 10000 + b" / HTTP/1.1\r\n\r\n",
    "a target of 100,000 characters": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + PLAIN_HEAD + b"\r\n",
    "a header of 100,000 characters": GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "10,000 headers": GET + b"X: y\r\n" * 10_000 + b"\r\n",
    "a name with a space": GET + b"X Y: z\r\n\r\n",
    "a folded header": GET + PLAIN_HEAD + b"X: a\r\n b\r\n\r\n",
    "two lengths": POST + b"Content-Length: 15\r\nContent-Length: 3\r\n\r\n" + GREET.encode(),
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a length in hexadecimal": POST + b"Content-Length: 0xf\r\n\r\n" + GREET.encode(),
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a length and chunks": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "an unknown transfer encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a chunk size that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\na",
    "a chunk longer than its size": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "an expectation of nobody": POST
    + CLOSE
    + b"Expect: the-inquisition\r\nContent-Length: 15\r\n\r\n"
    + GREET.encode(),
    "a body that is compressed": post("/completion", b"abc", b"Content-Encoding: gzip\r\n"),
    "a target without a host": b"GET http:///v1/status HTTP/1.1\r\n" + CLOSE + PLAIN_HEAD + b"\r\n",
    "a foreign host": GET + CLOSE + b"Host: \xff\xfe:1\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n" + CLOSE + PLAIN_HEAD + b"\r\n",
    "multipart": post(
        "/completion",
        b'--x\r\nContent-Disposition: form-data; name="Prompt"\r\n\r\nHi\r\n--x--',
        b"Content-Type: multipart/form-data; boundary=x\r\n",
    ),
    "an escape that is none": b"POST /comple%7tion HTTP/1.1\r\n" + CLOSE + PLAIN_HEAD + b"\r\n",
}

ANSWERED = {
    "an absolute target": b"GET http://127.0.0.1/v1/status HTTP/1.1\r\n" + PLAIN_HEAD + CLOSE + b"\r\n",
    "an upgrade": GET + PLAIN_HEAD + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
    "an escaped path": b"GET /v1/%73tatus HTTP/1.1\r\n" + PLAIN_HEAD + CLOSE + b"\r\n",
    "a query": b"GET /v1/status?%00=%ff&x=" + b"y" * 1000 + b" HTTP/1.1\r\n" + PLAIN_HEAD + CLOSE + b"\r\n",
    "a charset of nobody": post("/completion", GREET.encode(), b"Content-Type: application/json; charset=klingon\r\n"),
    "an awaited body": POST + CLOSE + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n" + GREET.encode(),
    "chunks with extensions": POST
    + CLOSE
    + b"Transfer-Encoding: chunked\r\n\r\nf;a=b\r\n"
    + GREET.encode()
    + b"\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_invalid_requests_are_refused_or_cut_off(name: str, victim: Victim) -> None:
    answer = await victim.exchange(REFUSED[name], half_close=True)
    assert status_of(answer) in {0, *range(400, 500)}, answer[:200]


@pytest.mark.parametrize("name", ANSWERED)
async def test_unusual_but_valid_requests_are_answered(name: str, victim: Victim) -> None:
    answer = await victim.exchange(ANSWERED[name])
    assert status_of(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")) == 200, answer[:200]


TOKENS = st.sampled_from(
    [
        *(
            b"GET",
            b"POST",
            b"HEAD",
            b"OPTIONS",
            b"CONNECT",
            b"get",
            b"\xff",
            b"/v1/status",
            b"/completion",
            b"/v1/tokenize",
        ),
        *(
            b"*",
            b"http://127.0.0.1/",
            b"//",
            b"/%",
            b"/%00%0a",
            b"HTTP/1.1",
            b"HTTP/1.0",
            b"HTTP/2.0",
            b" ",
            b"\t",
            b"\r\n",
        ),
        *(
            b"\n",
            b"\r",
            b"\0",
            b": ",
            b":",
            b"Host",
            b"127.0.0.1",
            b"Content-Length",
            b"0",
            b"5",
            b"-1",
            b"99999999999",
        ),
        *(
            b"Transfer-Encoding",
            b"chunked",
            b"Content-Encoding",
            b"deflate",
            b"br",
            b"Connection",
            b"close",
            b"upgrade",
        ),
        *(
            b"Upgrade",
            b"Expect",
            b"100-continue",
            b"Origin",
            b"Range",
            b"bytes=0-",
            b"Cookie",
            b"a=b;;",
            b"5\r\nhello\r\n",
        ),
        *(b"0\r\n\r\n", GREET.encode(), b"\r\n\r\n", b"x" * 9000),
    ]
)
LINES = st.sampled_from([b"GET /v1/status HTTP/1.1\r\n", POST, b"POST /v1/tokenize HTTP/1.0\r\n", b""])
NOISE = st.tuples(LINES, st.lists(TOKENS | st.binary(max_size=5), max_size=12).map(b"".join)).map(b"".join)


@settings(max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.lists(NOISE, min_size=25, max_size=25))
def test_noise_leaves_no_trace(noise: list[bytes], victim: Victim) -> None:
    async def send() -> None:
        answers = await asyncio.gather(*[victim.exchange(data, half_close=True) for data in noise])
        assert not [answer for answer in answers if re.match(rb"HTTP/1.. 5", answer)]

    asyncio.run(send())


async def test_noise_was_not_even_logged_as_a_fault(victim: Victim) -> None:
    async with victim.storm():
        await asyncio.gather(*[victim.exchange(data, half_close=True) for data in REFUSED.values()])


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


async def test_a_body_that_comes_a_byte_at_a_time_is_a_body(victim: Victim) -> None:
    reader, writer = await victim.open()
    for byte in completion(GREET):
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert status_of(answer) == 200
    assert answer.count(b'"Content":') == len(ANSWER) + 1


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /comp", POST + b"Content-Length: 15\r\n", POST + b"Content-Length: 15\r\n\r\n{", completion(ENDLESS)],
    ids=["nothing", "a line", "a head", "a body", "a request"],
)
@pytest.mark.parametrize("how", ["half", "abort"])
async def test_a_connection_may_end_in_any_phase(sent: bytes, how: str, victim: Victim) -> None:
    """A half-closed connection counts as closed, as for a Go server: the request is cancelled."""
    async with victim.storm():
        for pause in (0.0, 0.05):
            reader, writer = await victim.open()
            writer.write(sent)
            await asyncio.sleep(pause)
            if how == "abort":
                writer.transport.abort()
                continue
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 30)
            writer.close()


async def test_pipelined_requests_are_answered_one_after_the_other(victim: Victim) -> None:
    whole = POST + b"Content-Length: 15\r\n\r\n" + GREET.encode()
    status = GET + PLAIN_HEAD
    async with victim.storm():
        answer = await victim.exchange(
            whole
            + status
            + b"\r\n"
            + whole
            + b"GET /nope HTTP/1.1\r\n"
            + PLAIN_HEAD
            + b"\r\n"
            + status
            + CLOSE
            + b"\r\n"
        )
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200", b"200", b"404", b"200"]


async def test_an_abort_behind_pipelined_requests_cancels_all_of_them(victim: Victim) -> None:
    body = ENDLESS.encode()
    request = POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    async with victim.storm():
        reader, writer = await victim.open()
        writer.write(request * 40 + GET + b"\r\n")
        await asyncio.wait_for(reader.readline(), 30)
        writer.transport.abort()
