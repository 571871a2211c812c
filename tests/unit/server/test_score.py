"""`POST /v1/score` over an engine without a model: what is checked, what is computed, what is answered."""

import asyncio
import json

import pytest

from protocol import DoneReason, Metrics
from runner.engine.events import Event, Failed, Finished, Refused, Scored, Started
from runner.engine.request import Request
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.unit.server.script import CONTEXT, Client, Script

PROMPTS, TOKENS = "scoring requires 1\u201364 prompts", f"max_tokens must be between 1 and {CONTEXT}"


def rows(*prompts: str, candidates: str = "ABC") -> list[dict[str, object]]:
    return [{"prompt": prompt, "candidates": [*candidates]} for prompt in prompts]


REFUSALS = {
    "no rows": ({"max_tokens": 9}, PROMPTS),
    "65 rows": ({"max_tokens": 9, "rows": rows("a") * 65}, PROMPTS),
    "no max_tokens": ({"rows": rows("a")}, TOKENS),
    "more than the context": ({"max_tokens": CONTEXT + 1, "rows": rows("a")}, TOKENS),
    "an empty prompt": (
        {"max_tokens": 9, "rows": rows("a", "")},
        "prompt 1 has 0 tokens; expected 1\u20139 (input is never truncated)",
    ),
    "a long prompt": ({"max_tokens": 4, "rows": rows("xyzzy")}, "prompt 0 has 5 tokens; expected 1\u20134 (input"),
    "a very long prompt": ({"max_tokens": 9, "rows": rows("x" * 600_000)}, "tokens; expected 1\u20139 (input is never"),
    "no candidates": ({"max_tokens": 9, "rows": [{"prompt": "a"}]}, "prompt 0 requires 1\u201326 candidates"),
    "27 candidates": ({"max_tokens": 9, "rows": rows("a", candidates="A" * 27)}, "requires 1\u201326 candidates"),
    "two tokens": (
        {"max_tokens": 9, "rows": [{"prompt": "a", "candidates": ["A", "zq\n"]}]},
        'candidate "zq\\n" must append exactly one ordinary token to prompt 0',
    ),
    "no text": ({"max_tokens": 9, "rows": [{"prompt": "a", "candidates": [""]}]}, 'candidate "" must append exactly'),
    "twice": ({"max_tokens": 9, "rows": rows("a", candidates="ABA")}, "prompt 0 has invalid or duplicate candidate"),
    "beyond the model": ({"max_tokens": 9, "rows": rows("a") + rows("\u4e00")}, "prompt 1 has tokens that the model"),
    "no object": ([], "Bad Request: the body must be an object, found a list"),
    "a word for a number": ({"max_tokens": "9"}, "Bad Request: max_tokens must be an integer, found a string"),
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_everything_is_checked_before_anything_is_computed(what: str, client: Client, engine: Script) -> None:
    body, text = REFUSALS[what]
    response = await client.post("/v1/score", json=body)
    assert response.status == 400
    assert text in await response.text()
    assert not engine.submitted


def scored(engine: Script, request: Request, *logprobs: float, cached: int) -> None:
    metrics = Metrics(prompt_eval_count=len(request.prompt), prompt_eval_cached_count=cached)
    engine.tell(request, Started(), Scored([*logprobs]), Finished(DoneReason.STOP, metrics))


async def test_rows_are_computed_two_at_a_time_and_answered_in_order(client: Client, engine: Script) -> None:
    wanted = {"max_tokens": CONTEXT, "rows": rows("one", "two", "three"), "state": "ignored"}
    posted = asyncio.create_task(client.post("/v1/score", json=wanted))
    one, two = await engine.next(), await engine.next()
    assert (bytes(one.prompt), one.sampling.candidates, one.max_tokens) == (b"one", (65, 66, 67), 1)
    scored(engine, two, -4, -5, -6, cached=2)
    await asyncio.sleep(0.01)
    assert not engine.submitted
    scored(engine, one, -1, -2.5, -3, cached=0)
    scored(engine, await engine.next(), -7, -8, -9, cached=4)
    response = await posted
    assert response.content_type == "application/json"
    body = json.loads(await response.text())
    assert body == {"logits": [[-1, -2.5, -3], [-4, -5, -6], [-7, -8, -9]], "input_tokens": 11, "cached_tokens": 6}
    assert one.cancelled
    assert two.cancelled


@pytest.mark.parametrize(
    ("events", "status", "text"),
    [
        ((Started(), Failed("no memory")), 500, "no memory\n"),
        (
            (Refused("there is no room for it"),),
            400,
            "there is no room for it\n",
        ),
        (None, 0, ""),
    ],
    ids=["fails", "is refused", "has lost its client"],
)
async def test_a_row_that_is_not_computed_ends_the_others(
    events: tuple[Event, ...] | None, status: int, text: str, client: Client, engine: Script
) -> None:
    posted = asyncio.create_task(client.post("/v1/score", json={"max_tokens": 9, "rows": rows("one", "two", "three")}))
    one, two = await engine.next(), await engine.next()
    if events is None:
        posted.cancel()
    else:
        engine.tell(one, *events)
        response = await posted
        assert (response.status, await response.text()) == (status, text)
    async with asyncio.timeout(5):
        while not (one.cancelled and two.cancelled):
            await asyncio.sleep(0.001)
    assert not engine.submitted


def sizes_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that grows by the size of each text that is tokenized."""
    sizes: list[int] = []
    encode = Tokenizer.encode_without_bos

    def counted(tokenizer: Tokenizer, text: str) -> list[int]:
        sizes.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode_without_bos", counted)
    return sizes


async def test_a_repeat_is_tokenized_once(client: Client, engine: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_encoded(monkeypatch)
    found = []
    for wanted in ("ABC", "ABC", "CBA"):
        body = {"max_tokens": CONTEXT, "rows": rows("one", candidates=wanted)}
        posted = asyncio.create_task(client.post("/v1/score", json=body))
        request = await engine.next()
        found.append((request.sampling.candidates, len(sizes)))
        scored(engine, request, -1, -2, -3, cached=0)
        assert (await posted).status == 200
    assert found == [((65, 66, 67), 4), ((65, 66, 67), 5), ((67, 66, 65), 9)]


async def test_only_the_last_message_is_tokenized_for_each_candidate(
    client: Client, engine: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"tokenizer.json": json.dumps(byte_level(ALL_BYTES, ["<|turn|>"])).encode(), "config.json": b"{}"}
    engine.tokenizer = open_tokenizer(files.get)
    engine.limits = engine.limits._replace(context_length=10_000, vocab_size=0)
    encode, sizes = Tokenizer.encode_without_bos, sizes_encoded(monkeypatch)
    prompt = "x" * 5000 + "<|turn|>x<|turn|>answer: "
    body = {"max_tokens": 10_000, "rows": rows(prompt, candidates="ABCDEFG")}
    posted = asyncio.create_task(client.post("/v1/score", json=body))
    request = await engine.next()
    assert request.prompt == encode(engine.tokenizer, prompt)
    assert sum(sizes) < 5500
    posted.cancel()
    response = await client.post(
        "/v1/score", json={"max_tokens": 9, "rows": [{"prompt": "a", "candidates": ["<|turn|>"]}]}
    )
    assert 'candidate "<|turn|>" must append exactly one ordinary token' in await response.text()
