"""Bodies that are large, deeply nested, compressed or invalid, several at once."""

import asyncio

import pytest

from tests.process.hostile.victim import CONTEXT, Victim, completion, status_of

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
