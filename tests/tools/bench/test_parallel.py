"""The benchmark of several users: its model, its clients on a stage, and its arithmetic."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from aiohttp import web
from pytest_aiohttp import AiohttpServer
from tokenizers import Tokenizer

from scripts.tools.bench.llamas import VOCABULARY, Prompts, Size, make_model, write_model
from scripts.tools.bench.parallel import largest_gap, rate
from scripts.tools.bench.servers import MismeasuredError, ask, mlx_lm_server
from scripts.tools.host.lib import StatusError

TINY = Size(hidden=64, layers=1)


# --- the model


def test_a_prompt_of_n_tokens_is_n_tokens_and_an_answer_holds_only_words(tmp_path: Path) -> None:
    model = make_model(TINY, 1)
    write_model(tmp_path, model, TINY)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompts, same = Prompts(3), Prompts(3)
    text = prompts.text(2000)
    assert tokenizer.encode(text).ids == same.ids(2000)
    assert prompts.text(2000) != text
    assert [tokenizer.decode([token]) for token in (256, VOCABULARY - 2)] == [" a", " eqq"]
    logits = model(mx.array([same.ids(64)]))[0]
    assert not mx.any(logits[:, mx.array([*range(256), VOCABULARY - 1])]).item()
    assert mx.all(logits.max(axis=-1) > 0).item()


# --- figures


def test_a_rate_counts_from_the_last_first_line_to_the_first_end() -> None:
    assert rate([[1.0, 2.0, 3.0, 4.0]]) == 1.0
    assert rate([[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 2.5, 3.0, 3.5, 4.0, 9.0]]) == 7 / 3
    assert rate([[1.0, 2.0], [3.0, 5.0]]) == 3 / 4


def test_a_gap_counts_when_a_part_of_it_lies_within() -> None:
    lines = [0.0, 4.0, 5.0, 6.0, 7.0, 10.0, 16.0]
    assert [largest_gap(lines, *between) for between in ((3.9, 7.1), (4.0, 7.0), (5.0, 10.5))] == [4.0, 1.0, 6.0]


async def test_the_protocol_of_openai(aiohttp_server: AiohttpServer) -> None:
    asked: list[object] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        if "bad" in str(asked[-1]):
            raise web.HTTPNotFound(text="no such model")
        response = web.StreamResponse()
        await response.prepare(request)
        for text in (" one", "", " two"):
            await response.write(b": keepalive 1/2\n\n")
            await response.write(f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    port = (await aiohttp_server(app)).port
    assert port is not None
    process = type("Listening", (), {"port": port})()
    endpoint = mlx_lm_server("peer", "off", "1").endpoint(process, Path("model"))
    try:
        assert len(await ask(endpoint, "a", 2)) == 2
        with pytest.raises(MismeasuredError, match="2 lines came for 5 tokens"):
            await ask(endpoint, "a", 5)
        with pytest.raises(StatusError, match="no such model"):
            await ask(endpoint, "bad", 2)
    finally:
        await endpoint.close()
    assert asked[0] == {"model": "model", "prompt": "a", "max_tokens": 2, "temperature": 0.0, "stream": True}
