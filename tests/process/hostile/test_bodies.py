"""Bodies that are large, deeply nested, compressed or invalid, several at once."""

import asyncio
import gzip
import json
import zlib
from functools import cache

import pytest

from tests.process.hostile.victim import CONTEXT, PLAIN_HEAD, Victim, completion, post, status_of

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


@pytest.mark.slow
async def test_prompts_of_64_mib_again_and_again_add_nothing(victim: Victim) -> None:
    for slack_bytes in (SLACK_BYTES, SLACK_BYTES // 2, SLACK_BYTES // 2):
        for piece in ("the quick brown fox ", "\\n", "\\u003c", "\N{GRINNING FACE}"):
            body = prompt(piece)
            async with victim.storm(slack_bytes):
                answers = await asyncio.gather(*[victim.exchange(body, timeout_s=300) for _ in range(2)])
            assert all(TOO_LONG in answer for answer in answers)


@pytest.mark.slow
async def test_64_mib_are_tokenized(victim: Victim) -> None:
    text = b"the quick brown fox\n" * (BIG // 20)
    async with victim.storm(SLACK_BYTES):
        answer = await victim.exchange(post("/v1/tokenize", text), timeout_s=600)
    _, _, body = answer.partition(b"\r\n\r\n")
    assert body.count(b",") == len(text) - 1


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


@pytest.mark.parametrize("path", ["/completion", "/v1/tokenize"])
async def test_a_body_that_cannot_fit_is_refused_before_it_arrives(path: str, victim: Victim) -> None:
    reader, writer = await victim.open()
    writer.write(f"POST {path} HTTP/1.1\r\nContent-Length: {400 * MEGABYTE}\r\n".encode() + PLAIN_HEAD + b"\r\n")
    assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] == b"413"
    writer.close()


async def test_a_prompt_that_cannot_fit_is_refused_while_it_arrives(victim: Victim) -> None:
    """Eight of a hundred megabytes are sent; the longest prompt of this model has four."""
    reader, writer = await victim.open()
    writer.write(f"POST /completion HTTP/1.1\r\nContent-Length: {100 * MEGABYTE}\r\n".encode() + PLAIN_HEAD + b"\r\n")
    writer.write(b'{"Prompt":"' + b"x" * (8 * MEGABYTE))
    answer = await asyncio.wait_for(reader.readuntil(b"tokens)\n"), 30)
    writer.transport.abort()
    assert TOO_LONG in answer


async def test_short_texts_are_tokenized_while_long_ones_are(victim: Victim) -> None:
    """Four concurrent requests of some megabytes end when their clients disconnect."""
    text = b"the quick brown fox\n" * (16 * MEGABYTE // 20)
    async with victim.storm(SLACK_BYTES):
        long = [asyncio.create_task(victim.exchange(post("/v1/tokenize", text), timeout_s=120)) for _ in range(4)]
        answers = [await victim.exchange(post("/v1/tokenize", b"Hi")) for _ in range(20)]
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
    assert {answer.partition(b"\r\n\r\n")[2] for answer in answers} == {b"[72,105]"}


async def test_a_valid_body_of_20_mb_is_answered(victim: Victim) -> None:
    body = json.dumps({"Prompt": "Hi", "Media": None, "Padding": "x" * 20_000_000})
    async with victim.storm(SLACK_BYTES):
        answer = await victim.exchange(completion(body), timeout_s=60)
    assert status_of(answer) == 200
    assert b'"Done":true' in answer


async def test_texts_of_megabytes_are_tokenized_whole_while_others_are_served(victim: Victim) -> None:
    text = "the quick brown fox\n" * (MEGABYTE // 20)
    async with victim.storm(SLACK_BYTES):
        answers = await asyncio.gather(
            *[victim.exchange(post("/v1/tokenize", text.encode()), timeout_s=120) for _ in range(3)]
        )
    for answer in answers:
        head, _, chunks = answer.partition(b"\r\n\r\n")
        assert b"chunked" in head
        assert json.loads(_unchunked(chunks)) == list(text.encode())


def _unchunked(chunks: bytes) -> bytes:
    body, at = b"", 0
    while size := int(chunks[at : (end := chunks.index(b"\r\n", at))], 16):
        body += chunks[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return body


@cache
def bomb(wbits: int) -> bytes:
    """Returns some megabytes that decompress to a gigabyte."""
    squeeze = zlib.compressobj(1, wbits=wbits)
    return b"".join(squeeze.compress(bytes(MEGABYTE)) for _ in range(1024)) + squeeze.flush()


@pytest.mark.parametrize(
    ("path", "encoding"),
    [
        *(
            ("/completion", "gzip"),
            ("/v1/tokenize", "gzip"),
            ("/completion", "deflate"),
            ("/v1/tokenize", "gzip, gzip"),
        ),
        *(("/completion", "br"), ("/completion", "zstd"), ("/completion", "nonsense")),
    ],
)
async def test_a_bomb_is_not_unpacked(path: str, encoding: str, victim: Victim) -> None:
    body = bomb(zlib.MAX_WBITS if encoding == "deflate" else zlib.MAX_WBITS + 16)
    async with victim.storm(16 * MEGABYTE):
        answer = await victim.exchange(post(path, body, f"Content-Encoding: {encoding}\r\n".encode()))
    assert status_of(answer) == 400


async def test_a_body_that_calls_itself_identical_is_taken(victim: Victim) -> None:
    answer = await victim.exchange(post("/completion", b'{"Prompt":"Hi"}', b"Content-Encoding: Identity\r\n"))
    assert status_of(answer) == 200


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
