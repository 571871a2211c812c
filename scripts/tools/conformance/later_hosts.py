"""Additions of hosts after August 2026 (docs/internals/wire.md, 11)."""

import json
import signal

from scripts.tools.conformance.assertions import ALPHABET, expect, generating, quiet, text_of
from scripts.tools.conformance.cases import Need, Section, asks, life, reads, wire
from scripts.tools.conformance.runners import Target
from scripts.tools.conformance.sampling import first_entry
from scripts.tools.conformance.spawn import answer, exited
from scripts.tools.host.lib import Client, Request, StatusError
from scripts.tools.host.lib.requests import encode

LATER_HOSTS = Section("Since September 2026")
FORMAT = asks("Format")
METRICS = asks("IncludeIntermediateMetrics")
NO_FLAG = Need(lambda generation: not generation.engine_flag, "the host passes the engine flag")
KILLS = Need(lambda generation: not generation.close_grace_s, "the host sends SIGINT first")
METRIC_KEYS = {"PromptEvalCount", "PromptEvalCachedCount", "PromptEvalDuration", "EvalCount", "EvalDuration"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BAD_FORMATS: tuple[object, ...] = (
    {"type": "structural_tag", "format": {"type": "no such kind"}},
    {"type": "structural_tag"},
    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": 5}}},
    5,
    [],
)


@LATER_HOSTS.case("11.1", "without-engine-flag", life, NO_FLAG)
async def the_engine_flag_may_be_there_or_not(target: Target) -> None:
    """It is spawned without the engine flag, but still accepts it."""
    expect("answer without", await target.text("Hi"), ALPHABET)
    async with target.spawn(words=["runner", "--mlx-engine", "--model", "{model}", "--port", "{port}"]) as process:
        expect("answer with", await answer(target, process), ALPHABET)


@LATER_HOSTS.case("11.2", "new-keys", wire, FORMAT)
async def the_new_keys_are_always_there(target: Target) -> None:
    """`Format` and `IncludeIntermediateMetrics` are always sent: null, empty and false ask for nothing."""
    request = Request("Hi", {"num_predict": 3}, format=None)
    sent = json.loads(encode(request, target.generation))
    for extra in ({}, {"Format": ""}, {"IncludeIntermediateMetrics": None}):
        expect(f"text with {extra}", text_of(await target.post({**sent, **extra})), "jkl")


@LATER_HOSTS.case("11.3", "cached-count", wire, reads("PromptEvalCachedCount"))
async def the_last_line_counts_cached_tokens(target: Target) -> None:
    """The last line counts the prompt's cached tokens, or null; one token at least is computed."""
    prompt = target.runners.unheard() + "x"
    for _ in range(2):
        final = json.loads((await target.complete(Request(prompt))).lines[-1])
        assert "PromptEvalCachedCount" in final, "no PromptEvalCachedCount"
        cached = final["PromptEvalCachedCount"]
        if cached is not None:
            assert type(cached) is int, f"it is {cached!r}"
            assert 0 <= cached < final["PromptEvalCount"], f"{cached} of {final['PromptEvalCount']} tokens are cached"


@LATER_HOSTS.case("11.4", "intermediate-metrics", wire, METRICS)
async def the_counters_are_on_every_line_when_asked_for(target: Target) -> None:
    """Every line has the counters so far if the request asks for them; otherwise only the last one has."""
    client = await target.client()
    request = Request("metrics: a", {"num_predict": 5})
    for line in (await client.complete(request)).lines[:-1]:
        counted = [key for key, value in json.loads(line).items() if key in METRIC_KEYS and value]
        expect("counters that nobody asked for", counted, [])
    metered = await client.complete(Request("metrics: a", {"num_predict": 5}, intermediate_metrics=True))
    expect("tokens so far", [answer.eval_count for answer in metered.answers], [1, 2, 3, 4, 5, 5])
    for line, told in zip(metered.lines, metered.answers, strict=True):
        expect("missing counters", METRIC_KEYS - set(json.loads(line)), set())
        expect("prompt tokens", told.prompt_eval_count, 10)
        expect("cached tokens", told.prompt_eval_cached_count, metered.final.prompt_eval_cached_count)
        expect("prefill time", told.prompt_eval_duration, metered.final.prompt_eval_duration)
    durations = [told.eval_duration for told in metered.answers]
    expect("decode times", durations, sorted(durations))


@LATER_HOSTS.case("11.5", "first-of-two-passes", wire, METRICS)
async def a_first_pass_may_be_cut_and_continued(target: Target) -> None:
    """If the host cuts an answer off at a content line, a second request continues it, and no error appears."""
    client, process = await target.client(), await target.process()
    prompt = target.runners.unheard() + "<go>"
    first = await client.complete(Request(prompt, intermediate_metrics=True), cancel_after=2)
    assert first.cancelled, "there was nothing to cut off"
    expect("tokens so far", first.answers[-1].eval_count, 2)
    second = await client.complete(Request(prompt + first.text, intermediate_metrics=True))
    expect("both passes", first.text + second.text, "<think>xyz")
    quiet(process)


@LATER_HOSTS.case("11.6", "logprob-floor", wire, FORMAT)
async def logprobs_are_floored(target: Target) -> None:
    """Logprobs below -9999 are -9999."""
    entry = await first_entry(target, "<deep>", 3)
    expect("values", [entry.logprob, *(top.logprob for top in entry.top)], [0.0, 0.0, -9999.0, -9999.0])


@LATER_HOSTS.case("11.7", "sigkill", life, KILLS)
async def it_is_killed_and_started_again(target: Target) -> None:
    """It is closed by SIGKILL, even during an answer, and the next one can start."""
    for _ in range(2):
        async with target.spawn() as process, Client(process.port, target.generation) as client:
            expect("answer", (await client.complete(Request("Hi"))).text, ALPHABET)
            async with generating(client):
                process.send_signal(signal.SIGKILL)
                await exited(process, 1.0)


async def format_refusal(target: Target, format_: object, *statuses: int) -> str:
    """The text that "Hi" gets under this format, or an empty one where it is refused with one of these statuses."""
    told = json.dumps(format_)
    try:
        completion = await target.complete(Request("Hi", {"num_predict": 60}, format=format_))
    except StatusError as refusal:
        expect(f"whether {refusal.status} for {told} is one of {statuses}", refusal.status in statuses, True)
        clear = any(word in str(refusal).lower() for word in ("format", "grammar", "structured output"))
        expect(f"whether {str(refusal)!r} for {told} is clear", clear, True)
        return ""
    return completion.text


@LATER_HOSTS.case("11.8", "bad-format", wire, FORMAT)
async def a_bad_format_is_refused(target: Target) -> None:
    """An invalid `Format` is 400 with a clear text, or 501 if the runner has no grammars at all."""
    for format_ in BAD_FORMATS:
        statuses = (400, 501) if isinstance(format_, dict) else (400,)
        expect(f"text under {json.dumps(format_)}", await format_refusal(target, format_, *statuses), "")


@LATER_HOSTS.case("11.9", "format-not-ignored", wire, FORMAT)
async def a_format_is_obeyed_or_refused(target: Target) -> None:
    """A `Format` is obeyed or refused, never ignored."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
    text = await format_refusal(target, tag if target.generation.format == "tag" else SCHEMA, 400, 501)
    assert not text or text.lstrip().startswith("{"), f"the text is {text!r}"
