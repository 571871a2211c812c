"""Bodies that are large, deeply nested, compressed or invalid, several at once."""

import asyncio
import gzip
import json
import zlib
from functools import cache

import pytest

from tests.process.hostile.victim import CONTEXT, Victim, completion, post, status_of

MEGABYTE = 1 << 20
BIG = 64 * MEGABYTE
SLACK_BYTES = 160 * MEGABYTE
"""Memory that malloc may keep after the storms. Each of the two helper threads has an arena, which stays as large as
tokenizing one part (some ten megabytes for each quarter) has made it, and pieces of one body remain."""


def prompt(piece: str, size: int = BIG) -> bytes:
    return completion(f'{{"Prompt":"{piece * (size // len(piece.encode()))}"}}')


TOO_LONG = f"exceeds the model's maximum context length ({CONTEXT} tokens)".encode()


async def test_prompts_of_64_mib_are_refused_and_their_memory_returns(victim: Victim) -> None:
    bodies = [prompt("the quick brown fox "), prompt("\\n")]
    async with victim.storm(SLACK_BYTES):
        answers = await asyncio.gather(*[victim.exchange(body, timeout_s=120) for body in bodies])
    assert all(TOO_LONG in answer for answer in answers)


HELD_BYTES = 32 * MEGABYTE
"""The memory that a body without any used parts may take."""
UNUSED = {
    "brackets in a string": (b'{"Prompt":"Hi","x":"', b"[,:{", b'"}', 150),
    "escapes in a string": (b'{"Prompt":"Hi","x":"', b'\\"\\n', b'"}', 50),
    "what follows the request": (b'{"Prompt":"Hi"}', b'{"x":["', b"", 150),
}


@pytest.mark.parametrize("name", UNUSED)
async def test_unused_parts_of_a_body_are_not_kept(name: str, victim: Victim) -> None:
    head, piece, tail, megabytes = UNUSED[name]
    rss, most = victim.rss_bytes(), 0
    async with victim.storm(HELD_BYTES):
        sending = asyncio.create_task(victim.send_large("/completion", head, piece, tail, megabytes * MEGABYTE))
        while not sending.done():
            most = max(most, victim.rss_bytes())
            await asyncio.sleep(0.05)
    assert status_of(await sending) == 200
    assert most - rss < HELD_BYTES


async def test_pictures_are_refused_without_being_kept(victim: Victim) -> None:
    head, tail = b'{"Prompt":"Hi","Media":[{"data":"', b'","id":0,"Kind":"image"}]}'
    async with victim.storm(HELD_BYTES):
        answer = await victim.send_large("/completion", head, b"abcd", tail, 100 * MEGABYTE)
    assert b"this model does not support image input" in answer


@cache
def bomb(wbits: int) -> bytes:
    """Returns some megabytes that decompress to a gigabyte."""
    squeeze = zlib.compressobj(1, wbits=wbits)
    return b"".join(squeeze.compress(bytes(MEGABYTE)) for _ in range(1024)) + squeeze.flush()


@pytest.mark.parametrize(
    ("path", "encoding"),
    [("/completion", "gzip"), ("/v1/tokenize", "gzip, gzip"), ("/completion", "deflate"), ("/completion", "br")],
)
async def test_a_bomb_is_not_unpacked(path: str, encoding: str, victim: Victim) -> None:
    body = bomb(zlib.MAX_WBITS if encoding == "deflate" else zlib.MAX_WBITS + 16)
    async with victim.storm(16 * MEGABYTE):
        answer = await victim.exchange(post(path, body, f"Content-Encoding: {encoding}\r\n".encode()))
    assert status_of(answer) == 400


DEEP = 100_000
MALFORMED = {
    "deep lists": b'{"Format":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep and broken off": b'{"Options":' + b'{"a":[' * DEEP,
    "gzip without saying so": gzip.compress(b'{"Prompt":"Hi"}'),
    "UTF-16": '{"Prompt":"Hi"}'.encode("utf-16"),
    "a million keys": b"{" + b'"":0,' * 1_500_000 + b'"":0}',
    "a million media": b'{"Media":[' + b"{}," * 1_500_000 + b"{}]}",
    "NaN": b'{"Prompt":"Hi","Options":{"temperature":NaN}}',
    "infinity": b'{"Prompt":"Hi","Options":{"temperature":1e999}}',
    "a number of a million digits": b'{"Prompt":"Hi","Options":{"seed":' + b"9" * MEGABYTE + b"}}",
    "a million stop strings": json.dumps({"Prompt": "Hi", "Options": {"stop": ["x"] * 1_000_000}}).encode(),
    "nothing": b"",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_an_invalid_request_is_refused_quickly_with_a_400(name: str, victim: Victim) -> None:
    async with victim.storm(SLACK_BYTES):
        answers = await asyncio.gather(*[victim.exchange(post("/completion", MALFORMED[name])) for _ in range(3)])
    assert [status_of(answer) for answer in answers] == [400] * 3
