"""Conformance cases 71-74: tokenize, also while a completion is open."""

import time

import pytest

from tests.host import Client, Request
from tests.process.script import BEGIN, END, token


async def test_case_71_text_becomes_ids(client: Client, small_client: Client) -> None:
    assert await client.tokenize("hello") == list(b"hello")
    assert await small_client.tokenize("hello") == [BEGIN, *b"hello"]
    reply = await client.send("POST", "/v1/tokenize", "é\n".encode(), {"Content-Type": "text/plain"})
    assert (reply.status, reply.headers["content-type"].split(";")[0]) == (200, "application/json")


async def test_case_72_special_texts_become_their_ids(client: Client, small_client: Client) -> None:
    assert await client.tokenize("<|end|>") == [END]
    assert await small_client.tokenize("<|end|>") == [BEGIN, END]
    assert await client.tokenize("a<think>b<|end|>") == [ord("a"), token("<think>"), ord("b"), END]


async def test_case_73_tokenize_is_answered_while_a_stream_is_open(client: Client) -> None:
    async with client.stream(Request("0")) as stream:
        async for answer in stream:
            assert not answer.done
            break
        started = time.monotonic()
        assert await client.tokenize("hello") == list(b"hello")
        assert time.monotonic() - started < 1.0


async def test_case_73_tokenize_is_answered_inside_the_final_line(client: Client) -> None:
    completion = await client.complete(Request("Hi"), tokenize=True)
    assert completion.context == list(b"Hijklmnopqrstuvwxyz")


async def test_case_74_nothing_is_no_tokens(client: Client, small_client: Client) -> None:
    assert await client.tokenize("") == []
    assert await small_client.tokenize("") == [BEGIN]


@pytest.mark.parametrize("body", [b"\xff\xfe", b"a\x00b", "\ufffd\u2028".encode()])
async def test_any_bytes_are_answered_with_ids(body: bytes, client: Client) -> None:
    reply = await client.send("POST", "/v1/tokenize", body)
    assert reply.status == 200
    assert reply.body.startswith(b"[")


async def test_a_large_text_is_tokenized_whole(client: Client) -> None:
    assert len(await client.tokenize("y" * 1_000_000)) == 1_000_000
