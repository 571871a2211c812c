"""Tokenizing beyond the conformance cases 71-74: any bytes, any length."""

import pytest

from scripts.tools.host.lib import Client


@pytest.mark.parametrize("body", [b"\xff\xfe", b"a\x00b", "\ufffd\u2028".encode()])
async def test_any_bytes_are_answered_with_ids(body: bytes, client: Client) -> None:
    reply = await client.send("POST", "/v1/tokenize", body)
    assert reply.status == 200
    assert reply.body.startswith(b"[")


async def test_a_large_text_is_tokenized_whole(client: Client) -> None:
    assert len(await client.tokenize("y" * 1_000_000)) == 1_000_000
