"""Cases 21-35: what a completion request may look like, and how a bad one is refused."""

import base64
import json
import time

from scripts.tools.conformance.assertions import ALPHABET, expect, generating, refusal, refused, text_of
from scripts.tools.conformance.cases import Section, asks, once, wire
from scripts.tools.conformance.models import SMALL
from scripts.tools.conformance.runners import Target
from scripts.tools.conformance.scripted_model import CONTEXT, SMALL_CONTEXT
from scripts.tools.host.lib import Client, Medium, Reply, Request
from scripts.tools.host.lib.requests import encode

REQUESTS = Section("Requests")


async def send_own(target: Target, path: str) -> Reply:
    """The answer to the request that this generation's host makes of "Hi <&>Hi" for a user who set no options."""
    request = Request("Hi <&>Hi", target.generation.default_options)
    return await target.post(encode(request, target.generation), path)


@REQUESTS.case(21, "completion", wire)
async def a_request_is_answered_with_json_lines(target: Target) -> None:
    """`POST /completion` with the host's own body is a stream of JSON lines, directly or through a redirect."""
    reply = await send_own(target, "/completion")
    expect("text", text_of(reply), ALPHABET)
    expect("content type", reply.headers["content-type"], "application/jsonl")
    assert "content-encoding" not in reply.headers, "the stream is compressed"
    assert reply.body.endswith(b"\n"), "the last line has no end"


@REQUESTS.case(21, "own-words", wire)
async def an_answer_is_read_in_the_hosts_own_words(target: Target) -> None:
    """The host finds text, counters and reason in the answer under the names that it knows."""
    completion = await target.complete(Request("Hi <&>Hi", target.generation.default_options))
    final = completion.final
    expect("text", completion.text, ALPHABET)
    expect("counters", (final.prompt_eval_count, final.eval_count, final.done_reason), (8, len(ALPHABET), 0))
    assert final.prompt_eval_duration >= 0, f"prompt_eval_duration is {final.prompt_eval_duration}"
    assert final.eval_duration > 0, f"eval_duration is {final.eval_duration}"


@REQUESTS.case(22, "v1-completions", wire)
async def v1_completions_is_the_same(target: Target) -> None:
    """`POST /v1/completions` is the same."""
    expect("text", text_of(await send_own(target, "/v1/completions")), ALPHABET)


@REQUESTS.case(23, "keys-in-any-case", once)
async def keys_match_in_any_case(target: Target) -> None:
    """Keys match in any case."""
    expect("lower case", text_of(await target.post({"prompt": "Hi", "options": {"num_predict": 3}})), "jkl")
    expect("mixed case", text_of(await target.post({"PROMPT": "Hi", "oPTIONS": {"Num_Predict": 3}})), "jkl")


@REQUESTS.case(24, "unknown-keys", once)
async def unknown_keys_are_ignored(target: Target) -> None:
    """Unknown keys are ignored."""
    body = {"Prompt": "Hi", "Foo": 1, "Bar": {"Prompt": [1]}, "Options": {"mirostat": 2, "logit_bias": {"1": 2}}}
    expect("text", text_of(await target.post(body)), ALPHABET)


NO_REQUESTS = (
    *(b"{", b"", b"[]", b'{"Prompt":5}', b"nonsense", b'"Hi"', b"5", b"true", b'{"Prompt":"a"', b'{"Prompt":["a"]}'),
    *(b'{"Prompt":"a","Options":[]}', b'{"Prompt":"a","Options":"x"}', b'{"Prompt":"a","Logprobs":1}'),
    *(b'{"Prompt":"a","TopLogprobs":"3"}', b'{"Prompt":"a","Options":{"stop":"x"}}', b'{"Prompt":"a\nb"}'),
    *(b'{"Prompt":"a","Options":{"temperature":NaN}}', b"{'Prompt':'a'}", b"[" * 200_000),
)


@REQUESTS.case(25, "bad-request", once)
async def what_is_no_request_is_a_bad_request(target: Target) -> None:
    """A body that is not a request is `400 Bad Request`."""
    for body in NO_REQUESTS:
        reply = await target.post(body)
        expect(f"status of {body[:50]!r}", reply.status, 400)
        refused(reply, "Bad Request")


@REQUESTS.case(26, "trailing-text", once)
async def only_the_first_json_value_is_read(target: Target) -> None:
    """Text after the first JSON value is ignored."""
    for rest in (b" trailing", b"\n{", b"]", b"\x00"):
        expect(f"text before {rest!r}", text_of(await target.post(b' {"Prompt":"x"}' + rest)), "yz")


@REQUESTS.case(27, "wrong-option-types", once)
async def wrong_types_in_options_are_refused_or_served(target: Target) -> None:
    """`1.0` for an int and `"0.5"` for a float are `400 Bad Request`, or served as meant."""
    for options in ({"top_k": 1.0}, {"temperature": "0.5"}):
        reply = await target.post({"Prompt": "Hi", "Options": options})
        if reply.status == 200:
            expect(f"text with {options}", text_of(reply), ALPHABET)
        else:
            refused(reply, "Bad Request")


@REQUESTS.case(28, "null-and-empty", once)
async def null_and_empty_are_zero(target: Target) -> None:
    """`null` and empty values count as absent."""
    nothing: tuple[dict[str, object], ...] = (
        {"Options": None},
        {"Media": None},
        {"Media": []},
        {"Logprobs": None, "TopLogprobs": None},
        {"Options": {"seed": None, "stop": None, "temperature": None, "top_k": None}},
    )
    for extra in nothing:
        expect(f"text with {extra}", text_of(await target.post({"Prompt": "Hi", **extra})), ALPHABET)


@REQUESTS.case(28, "no-options", wire)
async def a_host_without_options_is_served(target: Target) -> None:
    """A request without options is served."""
    expect("text", (await target.complete(Request("Hi", None))).text, ALPHABET)


@REQUESTS.case(29, "empty-prompt", wire)
async def an_empty_prompt_is_refused(target: Target) -> None:
    """An empty prompt is `400 empty prompt` where the model adds no BOS."""
    client = await target.client()
    refused(await target.post(encode(Request(""), client.generation)), "empty prompt")


@REQUESTS.case(30, "only-a-bos", wire)
async def an_empty_prompt_with_bos_is_one_token(target: Target) -> None:
    """An empty prompt is one token where the model adds a BOS."""
    final = (await target.complete(Request(""), SMALL)).final
    expect("counters", (final.prompt_eval_count, final.eval_count, final.done_reason), (1, 0, 0))


@REQUESTS.case(31, "context-full", wire)
async def a_prompt_that_fills_the_context_is_refused(target: Target) -> None:
    """A prompt as long as the context is refused with both lengths, one a token shorter gets exactly one token."""
    for tokens in (SMALL_CONTEXT, SMALL_CONTEXT + 1):
        text = f"input length ({tokens} tokens) exceeds the model's maximum context length ({SMALL_CONTEXT} tokens)"
        request = Request("0" * (tokens - 1))  # the BOS counts
        expect(f"{tokens} tokens", await refusal(target.complete(request, SMALL)), text)
    fits = await target.complete(Request("0" * (SMALL_CONTEXT - 2)), SMALL)
    expect("one token", (fits.text, fits.final.eval_count, fits.final.done_reason), ("1", 1, 1))
    ends = await target.complete(Request("0" * (SMALL_CONTEXT - 3) + "!"), SMALL)
    expect("EOS", (ends.text, ends.final.eval_count, ends.final.done_reason), ("", 0, 0))


@REQUESTS.case(32, "media-refused", wire, asks("Media"))
async def media_are_refused_by_kind(target: Target) -> None:
    """A text model refuses media with 400 and their kind; the first one counts."""
    for kind in ("image", "audio", ""):
        media = [Medium(b"\x89PNG", kind), Medium(b"RIFF", "other")]
        text = await refusal(target.complete(Request("[img-0] Hi", media=media)))
        expect(f"kind {kind!r}", text, f"this model does not support {kind or 'media'} input")


@REQUESTS.case(34, "refused-while-busy", once)
async def refusals_come_while_another_request_generates(target: Target) -> None:
    """Bad requests are refused at once while another request generates."""
    client = await target.client()
    async with generating(client), Client(await target.port(), target.generation) as other:
        full = f"input length ({CONTEXT} tokens) exceeds the model's maximum context length ({CONTEXT} tokens)"
        for prompt, text in (("", "empty prompt"), (5, "Bad Request"), ("0" * CONTEXT, full)):
            started = time.monotonic()
            refused(await other.send("POST", "/v1/completions", json.dumps({"Prompt": prompt}).encode()), text)
            taken = time.monotonic() - started
            assert taken < 1.0, f"a refusal took {taken:.1f} s"


@REQUESTS.case(35, "large-body", once)
async def large_bodies_are_accepted(target: Target) -> None:
    """A body of 20 MB is accepted."""
    padding = base64.b64encode(b"x" * 15_000_000)
    expect("text", text_of(await target.post(b'{"Padding":"' + padding + b'","Prompt":"Hi"}')), ALPHABET)
