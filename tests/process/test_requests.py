"""Conformance cases 21-35: what a completion request may look like, and how a bad one is refused."""

import asyncio
import base64
import json
import time

import pytest

from tests.host import GENERATIONS, Client, G, Generation, Medium, Process, Reply, Request, StatusError
from tests.host.answers import decode_answer
from tests.process.script import CONTEXT, SMALL_CONTEXT

ALPHABET = "jklmnopqrstuvwxyz"
OPTIONS = {"num_ctx": 4096, "num_batch": 512, "num_gpu": -1, "num_keep": 4, "typical_p": 1, "repeat_penalty": 1}


async def post(client: Client, body: object, path: str = "/completion") -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.send("POST", path, raw, {"Content-Type": "application/json"})


def text_of(reply: Reply) -> str:
    assert reply.status == 200, reply.text
    answers = [decode_answer(line, G) for line in reply.body.splitlines()]
    assert answers[-1] is not None
    assert answers[-1].done
    return "".join(answer.content for answer in answers if answer is not None)


def assert_refused(reply: Reply, text: str) -> None:
    assert (reply.status, reply.text) == (400, text + "\n")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
async def test_cases_21_22_both_paths_stream_json_lines(path: str, client: Client) -> None:
    body = {"Prompt": "Hi", "Media": None, "Options": OPTIONS, "Logprobs": False, "TopLogprobs": 0}
    reply = await post(client, body, path)
    assert text_of(reply) == ALPHABET
    assert reply.headers["content-type"] == "application/jsonl"
    assert reply.headers["transfer-encoding"] == "chunked"
    assert "content-encoding" not in reply.headers
    assert reply.body.endswith(b"\n")


async def test_case_23_keys_match_in_any_case(client: Client) -> None:
    assert text_of(await post(client, {"prompt": "Hi", "options": {"num_predict": 3}})) == "jkl"
    assert text_of(await post(client, {"PROMPT": "Hi", "oPTIONS": {"Num_Predict": 3}})) == "jkl"


async def test_case_24_unknown_keys_are_ignored(client: Client) -> None:
    body = {"Prompt": "Hi", "Foo": 1, "Bar": {"Prompt": [1]}, "Options": {"mirostat": 2, "logit_bias": {"1": 2}}}
    assert text_of(await post(client, body)) == ALPHABET


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"{",
            b"",
            b"[]",
            b'{"Prompt":5}',
            b"nonsense",
            b'"Hi"',
            b"5",
            b"true",
            b'{"Prompt":"a"',
            b'{"Prompt":["a"]}',
        ),
        *(b'{"Prompt":"a","Options":[]}', b'{"Prompt":"a","Options":"x"}', b'{"Prompt":"a","Logprobs":1}'),
        *(b'{"Prompt":"a","TopLogprobs":"3"}', b'{"Prompt":"a","Options":{"stop":"x"}}', b'{"Prompt":"a","Media":{}}'),
        *(b'{"Prompt":"a","Options":{"num_predict":1e3}}', b'{"Prompt":"a","Options":{"seed":99999999999999999999}}'),
        *(b'{"Prompt":"a","Options":{"temperature":NaN}}', b'{"Prompt":"a\nb"}', b"{'Prompt':'a'}"),
        pytest.param(b"[" * 200_000, id="deep"),
    ],
)
async def test_case_25_what_is_no_request_is_a_bad_request(body: bytes, client: Client) -> None:
    assert_refused(await post(client, body), "Bad Request")


@pytest.mark.parametrize("rest", [b" trailing", b"\n{", b"]", b"\x00"])
async def test_case_26_only_the_first_json_value_is_read(rest: bytes, client: Client) -> None:
    assert text_of(await post(client, b' {"Prompt":"x"}' + rest)) == "yz"


@pytest.mark.parametrize("options", [{"top_k": 1.0}, {"temperature": "0.5"}, {"stop": [1]}, {"num_predict": True}])
async def test_case_27_wrong_types_in_options_are_a_bad_request(options: object, client: Client) -> None:
    assert_refused(await post(client, {"Prompt": "a", "Options": options}), "Bad Request")


@pytest.mark.parametrize(
    "extra",
    [
        {"Options": None},
        {"Media": None},
        {"Media": []},
        {"Logprobs": None, "TopLogprobs": None},
        {"Format": None, "IncludeIntermediateMetrics": None},
        {"Format": ""},
        {"Options": {"seed": None, "stop": None, "temperature": None, "top_k": None}},
    ],
)
async def test_case_28_null_and_empty_are_zero(extra: dict[str, object], client: Client) -> None:
    assert text_of(await post(client, {"Prompt": "Hi", **extra})) == ALPHABET


async def test_null_is_an_empty_prompt(client: Client) -> None:
    for body in (b"null", b"{}", b'{"Prompt":null}'):
        assert_refused(await post(client, body), "empty prompt")


async def test_invalid_unicode_becomes_replacement_characters(client: Client) -> None:
    """Go reads half a surrogate pair, and a byte that is no UTF-8, as one U+FFFD each: three bytes here."""
    for broken in (b'{"Prompt":"\\ud83dx"}', b'{"Prompt":"\xffx"}'):
        reply = await post(client, broken)
        assert text_of(reply) == "yz"
        assert json.loads(reply.body.splitlines()[-1])["PromptEvalCount"] == 4


async def test_case_29_an_empty_prompt_without_bos_is_refused(client: Client) -> None:
    assert_refused(await post(client, {"Prompt": ""}), "empty prompt")


async def test_case_30_an_empty_prompt_with_bos_is_one_token(small_client: Client) -> None:
    final = (await small_client.complete(Request(""))).final
    assert (final.prompt_eval_count, final.eval_count, final.done_reason) == (1, 0, 0)


async def test_bos_is_not_de_duplicated(small_client: Client) -> None:
    final = (await small_client.complete(Request("<|begin|>x"))).final
    assert final.prompt_eval_count == 3


async def test_case_31_a_prompt_that_fills_the_context_is_refused(small_client: Client) -> None:
    """The BOS counts: 63 letters are 64 tokens."""
    refusal = (
        f"input length ({SMALL_CONTEXT} tokens) exceeds the model's maximum context length ({SMALL_CONTEXT} tokens)"
    )
    assert_refused(await post(small_client, {"Prompt": "0" * (SMALL_CONTEXT - 1)}), refusal)
    longer = await post(small_client, {"Prompt": "0" * SMALL_CONTEXT})
    assert_refused(longer, refusal.replace(f"({SMALL_CONTEXT}", f"({SMALL_CONTEXT + 1}", 1))
    fits = await small_client.complete(Request("0" * (SMALL_CONTEXT - 2)))
    assert (fits.text, fits.final.eval_count, fits.final.done_reason) == ("1", 1, 1)
    ends = await small_client.complete(Request("0" * (SMALL_CONTEXT - 3) + "!"))
    assert (ends.text, ends.final.eval_count, ends.final.done_reason) == ("", 0, 0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("image", "this model does not support image input"),
        ("audio", "this model does not support audio input"),
        ("", "this model does not support media input"),
    ],
)
async def test_case_32_media_are_refused_by_kind(kind: str, text: str, client: Client) -> None:
    medium = {"data": base64.b64encode(b"\x89PNG").decode(), "id": 0, "Kind": kind}
    assert_refused(await post(client, {"Prompt": "[img-0] Hi", "Media": [medium]}), text)
    with pytest.raises(StatusError, match=text):
        await client.complete(Request("[img-0] Hi", media=[Medium(b"\x89PNG", kind), Medium(b"RIFF", "other")]))


async def test_media_are_refused_before_the_prompt_is_looked_at(client: Client) -> None:
    medium = {"data": "", "id": 0, "Kind": "image"}
    reply = await post(client, {"Prompt": "", "Media": [medium]})
    assert_refused(reply, "this model does not support image input")


async def test_an_image_tag_without_media_is_plain_text(client: Client) -> None:
    assert text_of(await post(client, {"Prompt": "[img-3]x"})) == "yz"


async def test_case_34_refusals_come_while_another_request_generates(client: Client) -> None:
    async with client.stream(Request("0")) as stream:
        async for answer in stream:
            assert not answer.done
            break
        started = time.monotonic()
        assert_refused(await post(client, {"Prompt": ""}), "empty prompt")
        assert_refused(await post(client, b"{"), "Bad Request")
        assert (await post(client, {"Prompt": "0" * CONTEXT})).status == 400
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("mebibytes", [20, 64])
async def test_case_35_large_bodies_are_accepted(mebibytes: int, client: Client) -> None:
    padding = b"x" * (mebibytes << 20)
    body = b'{"Padding":"' + padding + b'","Prompt":"Hi"}'
    assert text_of(await post(client, body)) == ALPHABET


async def test_a_prompt_of_half_a_megabyte_is_counted_while_status_stays_quick(client: Client) -> None:
    length = 500_000
    refused = asyncio.create_task(post(client, {"Prompt": "x" * length}))
    slowest = 0.0
    while not refused.done():
        started = time.monotonic()
        await client.status()
        slowest = max(slowest, time.monotonic() - started)
        await asyncio.sleep(0.01)
    assert_refused(
        await refused,
        f"input length ({length} tokens) exceeds the model's maximum context length ({CONTEXT} tokens)",
    )
    assert slowest < 1.0


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda generation: generation.letter)
async def test_a_request_of_every_generation_is_answered_in_its_own_words(
    generation: Generation, shared: Process
) -> None:
    async with Client(shared.port, generation, shared.output) as client:
        completion = await client.complete(
            Request("Hi <&>Hi", generation.default_options), tokenize=generation.letter in "EFG"
        )
    assert completion.text == ALPHABET
    final = completion.final
    assert (final.prompt_eval_count, final.eval_count, final.done_reason) == (8, len(ALPHABET), 0)
    assert final.prompt_eval_duration >= 0
    assert final.eval_duration > 0
    if generation is G:
        assert final.prompt_eval_cached_count is not None
    if completion.context is not None:
        assert completion.context == list(b"Hi <&>Hi" + ALPHABET.encode())


async def test_generation_a_may_leave_options_out(shared: Process) -> None:
    async with Client(shared.port, GENERATIONS[0]) as client:
        assert (await client.complete(Request("Hi", None))).text == ALPHABET


async def test_generation_g_gets_the_counters_on_every_line_that_it_asks_for(shared: Process) -> None:
    async with Client(shared.port, G) as client:
        plain = await client.complete(Request("metrics: a", {"num_predict": 5}))
        metered = await client.complete(Request("metrics: a", {"num_predict": 5}, intermediate_metrics=True))
    keys = {"PromptEvalCount", "PromptEvalCachedCount", "PromptEvalDuration", "EvalCount", "EvalDuration"}
    for line in plain.lines[:-1]:
        assert not keys & set(json.loads(line))
    assert [answer.eval_count for answer in metered.answers] == [1, 2, 3, 4, 5, 5]
    for line, answer in zip(metered.lines, metered.answers, strict=True):
        assert keys <= set(json.loads(line))
        assert answer.prompt_eval_count == 10
        assert answer.prompt_eval_cached_count == 9, "the plain request left its prompt in the cache"
        assert answer.prompt_eval_duration == metered.final.prompt_eval_duration
    durations = [answer.eval_duration for answer in metered.answers]
    assert durations == sorted(durations)


async def test_a_format_is_refused_until_it_is_supported(shared: Process) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "object"}}}
    async with Client(shared.port, G) as client:
        with pytest.raises(StatusError, match="Format") as refusal:
            await client.complete(Request("Hi", format=tag))
    assert refusal.value.status == 400
