"""The endpoints over an engine without a model: refusals, delayed headers, clients that disconnect."""

import asyncio
import json
import logging
import re
from itertools import product

import pytest

from protocol import DoneReason, Metrics
from runner.engine.events import Failed, Finished, Started, Text
from runner.server.routes import is_local
from tests.unit.server.script import CONTEXT, MEMORY_BYTES, Client, Script

METRICS = Metrics(prompt_eval_count=2, eval_count=1)


@pytest.mark.parametrize("path", ["/v1/status", "/health"])
async def test_status_is_answered_from_the_last_published_numbers(client: Client, path: str) -> None:
    response = await client.get(path)
    assert (response.status, response.content_type) == (200, "application/json")
    status = {"Status": 0, "Progress": 100, "ContextLength": CONTEXT, "Memory": MEMORY_BYTES}
    assert await response.json() == {**status, "EmbeddingDimensions": None}


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/models"), ("POST", "/load")])
async def test_a_load_request_is_answered_as_done(client: Client, method: str, path: str) -> None:
    response = await client.request(method, path)
    assert await response.json() == {"Success": True}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/status", 405), ("GET", "/completion", 405), ("GET", "/v1/embeddings", 405), ("GET", "/nope", 404)],
)
async def test_a_wrong_path_or_method_is_refused_as_go_does(
    client: Client, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status == status
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert await response.text() == {405: "Method Not Allowed\n", 404: "404 page not found\n"}[status]
    assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/api/chat", "/api/tags", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_who_took_the_port_for_ollamas_is_told_where_that_is(client: Client, path: str) -> None:
    for response in (await client.post(path, data=b"{}"), await client.get(path)):
        text = await response.text()
        assert response.status == 404
        assert text.startswith("404 page not found: this is the port of a runner")
        assert all(word in text for word in ("11434", "OLLAMA_HOST", "mlx-runner ollama serve", "POST /completion"))
        assert text.count("\n") == 1


async def test_nothing_that_a_client_wrote_reaches_its_terminal_raw_or_at_length(client: Client) -> None:
    for kind in ("\x1b[31m\x9b\r\nimage", "\x1b" * 600):
        response = await client.post("/completion", json={"Prompt": "[img-0]", "Media": [{"Kind": kind}]})
        text = await response.text()
        assert response.status == 400
        assert text.startswith("this model does not support \\u001b")
        assert text.removesuffix("\n").isprintable()
        assert len(text) <= 2010


async def test_an_error_line_has_nothing_that_a_terminal_acts_on(client: Client, engine: Script) -> None:
    posted, request = await engine.posted(client)
    engine.tell(request, Started(), Failed("no \x1b[31m\x9b" + "x" * 5000))
    [line] = (await (await posted).read()).splitlines()
    text = json.loads(line)["Error"]["error"]
    assert text.startswith("no \\u001b[31m\\u009bxx")
    assert len(text) <= 2010


HOSTS = (None, "127.0.0.1:41000", "localhost", "[::1]:41000")
ORIGINS = (None, "http://localhost:3000", "http://127.0.0.1", "https://app.localhost")
FOREIGN_HOSTS = ("evil.example:41000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "10.0.0.1")
FOREIGN_ORIGINS = ("http://evil.example", "null", "", "http://localhost.evil.example", "file://")


def test_local_programs_are_accepted_and_rebound_names_and_foreign_pages_refused() -> None:
    for host, origin, site in product(HOSTS, ORIGINS, (None, "none", "same-origin", "same-site")):
        assert is_local(host, origin, site)
    refused = [*product(FOREIGN_HOSTS, ORIGINS), *product(HOSTS, FOREIGN_ORIGINS)]
    assert [pair for pair in refused if is_local(*pair, None)] == []


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
)
async def test_no_endpoint_answers_a_foreign_web_page(client: Client, engine: Script, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/v1/status"), ("POST", "/completion"), ("POST", "/v1/tokenize")):
        response = await client.request(method, path, headers=headers, data=b'{"Prompt":"x"}')
        assert response.status == 403
    assert not engine.submitted


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"Prompt": 5}, "Bad Request: Prompt must be a string, found 5\n"),
        ({"Prompt": "x", "Options": {"stop": "y"}}, "Bad Request: Options.stop must be a list of strings"),
        ({"Prompt": ""}, "empty prompt"),
        ({"Prompt": "", "Media": [{"Kind": "image"}]}, "this model does not support image input"),
        ({"Prompt": "x", "Media": [{"Kind": ""}]}, "this model does not support media input"),
        (
            {"Prompt": "x" * CONTEXT},
            f"input length ({CONTEXT} tokens) exceeds the model's maximum context length ({CONTEXT} tokens)",
        ),
        (
            {"Prompt": "x" * 40, "Options": {"num_ctx": 40}},
            "input length (40 tokens) exceeds the context length that num_ctx sets (40 tokens)",
        ),
        ({"Prompt": "ж"}, "the model has no token 208"),
        ({"Prompt": "x", "Format": 5}, 'Format: expected "json", a JSON schema'),
        ({"Prompt": "x", "Format": {"type": "sequence"}}, "Format: Object missing required field `elements`"),
        (
            {"Prompt": "xy", "Options": {"stop": ["s" * 1000] * 1000}},
            "the stop strings have 1000000 characters, and the limit is 65536",
        ),
    ],
)
async def test_an_invalid_request_gets_a_reason_and_never_reaches_the_engine(
    client: Client, engine: Script, body: dict[str, object], text: str
) -> None:
    response = await client.post("/completion", data=json.dumps(body))
    assert response.status == 400
    assert (await response.text()).startswith(text)
    assert not engine.submitted


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"type": "objec"}, "Invalid type: objec - at `$` of the JSON schema"),
        ({"type": "out of memory"}, "Invalid type: out-of-memory - at `$` of the JSON schema"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "regex", "pattern": ""}]},
            "only a const_string can end an any_text - at `$.elements[0]`",
        ),
    ],
)
async def test_a_format_that_does_not_compile_is_refused_and_its_request_dropped(
    client: Client, engine: Script, wanted: object, text: str
) -> None:
    asked, request = await engine.posted(client, Format=wanted)
    assert request.grammar is not None
    assert not request.grammar.done(), "a request that waits takes no memory"
    engine.tell(request, Started())
    response = await asked
    assert response.status == 400
    assert await response.text() == f"Format: {text}\n"
    assert request.cancelled


async def test_a_hopeless_prompt_is_refused_without_reading_all_of_it(client: Client, engine: Script) -> None:
    """It says how many tokens it has at least, by what came of it and the longest one that there is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8388608\r\n\r\n"
    writer.write(head + b'{"Prompt":"' + b"x" * (1 << 17))
    answer = await asyncio.wait_for(reader.readuntil(b"(100 tokens)\n"), 30)
    writer.close()
    found = re.search(rb"input length \((\d+) tokens\) exceeds the model's maximum context length", answer)
    assert answer.split()[1] == b"400"
    assert found is not None
    assert 100 <= int(found[1]) <= (1 << 17) // 64
    assert not engine.submitted


async def test_a_compressed_body_is_refused_without_being_unpacked(client: Client) -> None:
    """It is not even in the encoding that it claims to be in, and the connection goes on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n"
    writer.write((head + b"abcd") * 2 + b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answers = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"400", b"400", b"200"]
    assert (
        answers.count(b"Bad Request: the body has a Content-Encoding, which is not supported: send it uncompressed\n")
        == 2
    )


@pytest.mark.parametrize(
    ("wanted", "num_ctx", "limit"),
    [(0, 0, 98), (-1, 0, 98), (5, 0, 5), (1000, 0, 98), (0, 40, 38), (1000, 40, 38), (5, 40, 5), (0, 1000, 98)],
)
async def test_the_token_limit_is_the_requested_one_within_the_context(
    client: Client, engine: Script, wanted: int, num_ctx: int, limit: int
) -> None:
    posted, request = await engine.posted(client, Options={"num_predict": wanted, "num_ctx": num_ctx})
    assert (request.prompt, request.max_tokens) == ([120, 121], limit)
    posted.cancel()


async def test_headers_are_withheld_until_the_request_starts(client: Client, engine: Script) -> None:
    posted, request = await engine.posted(client)
    await asyncio.sleep(0.05)
    assert not posted.done()
    engine.tell(request, Started())
    response = await asyncio.wait_for(posted, 30)
    assert (response.status, response.headers["Content-Type"]) == (200, "application/jsonl")
    assert response.headers["Transfer-Encoding"] == "chunked"
    engine.tell(request, Finished(DoneReason.STOP, METRICS))
    assert json.loads(await response.text())["Done"] is True


async def test_a_fault_after_the_start_is_an_error_line(client: Client, engine: Script) -> None:
    """As it is: a host looks for `out of memory` in it."""
    for text in ("ValueError: boom", "out of memory: RuntimeError: [metal::malloc] Unable to allocate 5 bytes."):
        posted, request = await engine.posted(client)
        engine.tell(request, Started(), Failed(text))
        [line] = (await (await posted).read()).splitlines()
        assert json.loads(line)["Error"] == {"StatusCode": 500, "Status": "", "error": text}


@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_cancels_its_request(
    client: Client, engine: Script, started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runner.server")
    posted, request = await engine.posted(client)
    if started:
        engine.tell(request, Started())
        (await posted).close()
    else:
        posted.cancel()
    async with asyncio.timeout(5):
        while not request.cancelled or not caplog.records:
            await asyncio.sleep(0.001)
    assert caplog.messages == ["the client is gone"]


async def test_tokenize_takes_plain_text_and_answers_while_a_stream_is_open(client: Client, engine: Script) -> None:
    """Bytes that are not UTF-8 are tokenized as one replacement each."""
    posted, request = await engine.posted(client)
    engine.tell(request, Started())
    response = await posted
    replacement = list("\ufffd".encode())
    for text, ids in (
        ("hé".encode(), [104, 195, 169]),
        (b"", []),
        (b"a\xe2\x82b\xff", [97, *replacement * 2, 98, *replacement]),
    ):
        tokenized = await client.post("/v1/tokenize", data=text, headers={"Content-Type": "text/plain"})
        assert await tokenized.json() == ids
    response.close()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[104, 195, 169]", "h\u00e9"),
        (b"[195, 104, 195]", "\ufffdh\ufffd"),
        (b"[104, 9999999, -1, 9223372036854775807, 105]", "hi"),
        (b"[34, 92, 10]", '"\\\n'),
        (b"[]", ""),
        (b" null ", ""),
    ],
)
async def test_ids_become_their_text(body: bytes, text: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 4096):
        monkeypatch.setattr("runner.tokenizer.tokenizer._PART_IDS", size)
        assert await (await client.post("/v1/detokenize", data=body)).json() == text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is empty"),
        (b"{}", "the body must be a list, found an object"),
        (b'["a"]', "the body[0] must be an integer, found a string"),
        (b"[1.0]", "the body[0] must be an integer, found a number"),
        (b"[1", "invalid JSON at byte 2: the body ends too early"),
        (b"[0,true]", "the body[1] must be an integer, found true or false"),
        (b"[1" + b"0" * 9999 + b"]", "the body[0]: Integer value out of range"),
        (b"[" * 9999, "the body[0] must be an integer, found a list"),
    ],
)
async def test_anything_but_an_array_of_ids_is_a_bad_request(body: bytes, why: str, client: Client) -> None:
    response = await client.post("/v1/detokenize", data=body)
    assert (response.status, await response.text()) == (400, f"Bad Request: {why}\n")


async def test_unknown_ids_take_no_memory_and_long_arrays_are_refused(client: Client, engine: Script) -> None:
    assert await (await client.post("/v1/detokenize", data=str(list(range(10**6, 10**6 + 5000))))).json() == ""
    assert max(engine.tokenizer._bytes, default=0) < engine.tokenizer.vocab_size
    response = await client.post("/v1/detokenize", data=b"[" + b" " * (8 << 20) + b"]")
    assert response.status == 413


async def test_a_long_text_delays_a_short_one_by_one_part_at_most(
    client: Client, engine: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one helper thread here, and the text has 600 parts."""
    monkeypatch.setattr("runner.tokenizer.tokenizer.PART_CHARACTERS", 100)
    text = b"x" * 60_000
    response = await client.post("/v1/tokenize", data=text)
    tokenized = asyncio.create_task(response.json())
    posted, _ = await engine.posted(client)
    assert not tokenized.done()
    assert await tokenized == list(text)
    posted.cancel()


@pytest.mark.parametrize("size", [0, 100, 250])
async def test_the_end_of_an_array_of_ids_comes_with_the_end_of_the_answer(
    size: int, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host reads as far as the bracket, and then closes what has not ended by then."""
    monkeypatch.setattr("runner.tokenizer.tokenizer.PART_CHARACTERS", 100)
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    head = f"POST /v1/tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode() + b"x" * size)
    async with asyncio.timeout(10):
        received = await reader.readuntil(b"]")
    rest = bytes(reader._buffer)  # type: ignore[attr-defined]  # what arrived together with the bracket
    assert rest == (b"\r\n0\r\n\r\n" if b"chunked" in received else b"")
    assert (b"chunked" in received) == (size > 100)
    writer.close()


async def test_an_http_1_0_client_is_answered_until_the_connection_closes(client: Client, engine: Script) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b'POST /completion HTTP/1.0\r\nContent-Length: 15\r\n\r\n{"Prompt":"xy"}')
    request = await engine.next()
    for event in (Started(), Text("a", [], None), Finished(DoneReason.STOP, METRICS)):
        engine.tell(request, event)
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.0 200")
    assert [json.loads(line)["Done"] for line in body.splitlines()] == [False, True]
