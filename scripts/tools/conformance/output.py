"""Cases 36-52: the stream of a completion."""

import json
import re

from scripts.tools.conformance.assertions import ALPHABET, expect
from scripts.tools.conformance.cases import Section, argv, once, reads, sends, wire
from scripts.tools.conformance.models import SENTENCEPIECE, SMALL
from scripts.tools.conformance.runners import Target, caught
from scripts.tools.conformance.scripted_model import SMALL_CONTEXT, UTF8_VECTORS, token
from scripts.tools.host.lib import Client, Completion, Request, StatusError, Stream
from scripts.tools.host.lib.client import LINE_LIMIT_BYTES

OUTPUT = Section("Output")
STOP, LENGTH = 0, 1
SPELLINGS = (
    ("DoneReason", "done_reason"),
    ("PromptEvalCount", "prompt_eval_count"),
    ("PromptEvalDuration", "prompt_eval_duration"),
    ("EvalCount", "eval_count"),
    ("EvalDuration", "eval_duration"),
)
"""The counters as later and as early hosts read them."""


def ended(completion: Completion) -> tuple[str, int, int]:
    return completion.text, completion.final.done_reason, completion.final.eval_count


@OUTPUT.case(36, "greedy", wire)
async def absent_temperature_is_greedy(target: Target) -> None:
    """Without a temperature the likeliest token is taken, every time."""
    for prompt, best in (("<532>", "P"), ("<154>", "Q"), ("<equal>", "B")):
        texts = {await target.text(prompt, num_predict=1) for _ in range(4)}
        expect(f"texts after {prompt}", texts, {best})


@OUTPUT.case(37, "greedy-despite-filters", wire)
async def without_temperature_the_filters_do_not_matter(target: Target) -> None:
    """Without a temperature sampling is greedy, whatever top_p, top_k and seed are."""
    expect("text", await target.text("<532>", top_p=0.1, top_k=2, min_p=0.9, seed=11), "P")
    for seed in range(1, 6):
        text = await target.text("W", top_p=0.9, top_k=3, seed=seed, num_predict=8)
        expect("text after equal logits", text, "W" * 8)


@OUTPUT.case(38, "num-predict", wire)
async def num_predict_is_exact(target: Target) -> None:
    """num_predict tokens are emitted, no more and no less, and the reason is length."""
    completion = await target.complete(Request("Hi", {"num_predict": 5}))
    expect("text, reason, count", ended(completion), ("jklmn", LENGTH, 5))


@OUTPUT.case(39, "no-limit", wire)
async def no_limit_runs_to_the_end_of_sequence(target: Target) -> None:
    """Without a positive num_predict the answer runs to the EOS."""
    for options in ({}, {"num_predict": 0}, {"num_predict": -1}, {"num_predict": -2}):
        completion = await target.complete(Request("Hi", options))
        expect(f"text, reason, count with {options}", ended(completion), (ALPHABET, STOP, len(ALPHABET)))


@OUTPUT.case(39, "context-end", wire)
async def no_limit_runs_to_the_end_of_the_context(target: Target) -> None:
    """Without an EOS the answer runs to the end of the context, even if num_predict asks for more."""
    room = SMALL_CONTEXT - 3  # less BOS, <go> and 0
    digits = "1234567890" * room
    for options in ({}, {"num_predict": 1000}):
        completion = await target.complete(Request("<go>0", options), SMALL)
        expect(f"text, reason, count with {options}", ended(completion), (digits[:room], LENGTH, room))


@OUTPUT.case(40, "eos", wire)
async def the_end_token_is_neither_shown_nor_counted(target: Target) -> None:
    """The EOS ends the answer with reason stop, and is neither shown nor counted."""
    completion = await target.complete(Request("w", {"num_predict": 100}))
    expect("text, reason, count", ended(completion), ("xyz", STOP, 3))


@OUTPUT.case(41, "eos-after-limit", wire)
async def an_end_token_after_the_last_one_is_not_looked_at(target: Target) -> None:
    """An EOS right after num_predict tokens does not count: the reason is length."""
    completion = await target.complete(Request("w", {"num_predict": 3}))
    expect("text, reason, count", ended(completion), ("xyz", LENGTH, 3))


@OUTPUT.case(42, "eos-first", wire)
async def an_end_token_at_once_is_a_single_line(target: Target) -> None:
    """An EOS at once is a single line without content."""
    completion = await target.complete(Request("Hi!"))
    expect("text, reason, count", ended(completion), ("", STOP, 0))
    expect("lines", len(completion.lines), 1)
    expect("prompt tokens", completion.final.prompt_eval_count, 3)


@OUTPUT.case(43, "prompt-count", wire)
async def counters_do_not_depend_on_the_cache(target: Target) -> None:
    """The prompt's tokens are all counted, BOS and cached ones too; durations are nanoseconds."""
    prompt = target.runners.unheard() + "a"
    for what in ("a new prompt", "the same again"):
        final = (await target.complete(Request(prompt))).final
        expect(f"tokens of {what}", final.prompt_eval_count, len(prompt))
        assert final.prompt_eval_duration >= 0, f"{what}: prompt_eval_duration is {final.prompt_eval_duration}"
        assert final.eval_duration > 0, f"{what}: eval_duration is {final.eval_duration}"
    expect("tokens of seven and a BOS", (await target.complete(Request("seven a"), SMALL)).final.prompt_eval_count, 8)


@OUTPUT.case(44, "lines-before-the-last", wire)
async def lines_before_the_last_have_no_counters(target: Target) -> None:
    """Lines before the last one are not marked as done and have no counters."""
    completion = await target.complete(Request("Hi"))
    expect("text", completion.text, ALPHABET)
    for line in completion.lines[:-1]:
        body = json.loads(line)
        expect("Done", body.get("Done"), False)
        counted = [key for pair in SPELLINGS for key in pair if body.get(key)]
        expect("counters", counted, [])


@OUTPUT.case(45, "flushed", once)
async def every_token_is_flushed_when_it_is_there(target: Target) -> None:
    """A line is sent as soon as its token is there."""
    late = "400 lines"
    for _ in range(5):  # a client that waits for a processor, for half as long as the answer takes, reads them together
        completion = await target.complete(Request("5", {"num_predict": 400}))
        expect("lines", len(completion.lines), 401)
        spread_s = completion.arrivals[-1] - completion.arrivals[0]
        decode_s = completion.final.eval_duration / 1e9
        if spread_s > decode_s / 2:
            return
        late += f", of {decode_s:.3f} s within {spread_s:.3f} s"
    raise AssertionError(late)


@OUTPUT.case(45, "long-text", wire, beyond=True)
async def long_text_is_split_into_lines_that_a_host_can_read(target: Target) -> None:
    """No line is as long as 64 KiB, however long the text of a token."""
    completion = await target.complete(Request("<long>"))
    assert completion.text == "long " * 20000, f"{len(completion.text)} characters of 100000 arrived"
    expect("count", completion.final.eval_count, 1)


@OUTPUT.case(45, "long-logprobs", wire, reads("Logprobs"), beyond=True)
async def a_long_entry_does_not_end_the_stream(target: Target) -> None:
    """If logprobs do not fit into a line, the text still arrives."""
    completion = await target.complete(Request("<long>", logprobs=True, top_logprobs=2))
    assert completion.text == "long " * 20000, f"{len(completion.text)} characters of 100000 arrived"
    assert max(map(len, completion.lines)) < LINE_LIMIT_BYTES - 1, "a line of 64 KiB"


@OUTPUT.case(46, "plain-integers", wire)
async def numbers_are_plain_integers(target: Target) -> None:
    """Numbers are written as plain integers."""
    completion = await target.complete(Request("Hi", {"num_predict": 12}))
    for line in completion.lines:
        numbers = re.sub(r'"(\\.|[^"\\])*"|true|false|null', "", line.decode())
        assert not re.search(r"[^][{}:,\s\d-]", numbers), f"not an integer in {line!r}"
    expect("lines that the host could not read", len(completion.lines) - len(completion.answers), 0)


@OUTPUT.case(47, "special-tokens", wire)
async def special_tokens_are_text(target: Target) -> None:
    """Special tokens other than the EOS appear as text."""
    completion = await target.complete(Request("<go>"))
    expect("text", completion.text, "<think>xyz")
    expect("prompt tokens", completion.final.prompt_eval_count, 1)


@OUTPUT.case(48, "leading-space", wire)
async def the_leading_space_of_a_sentencepiece_word_is_kept(target: Target) -> None:
    """The space in front of a SentencePiece model's first word is kept."""
    completion = await target.complete(Request("who is it?"), SENTENCEPIECE)
    expect("text", completion.text, " Hello world")
    expect("prompt tokens, nothing put in front", completion.final.prompt_eval_count, 10)


@OUTPUT.case(49, "utf8", wire)
async def bytes_become_text_by_the_vectors(target: Target) -> None:
    """Bytes become text as soon as their characters are whole; each byte that cannot be part of one is U+FFFD."""
    for number, (chunks, emitted) in enumerate(UTF8_VECTORS):
        completion = await target.complete(Request(f"<utf8-{number}>"))
        expect(f"pieces of {chunks}", completion.pieces, list(emitted))
        expect(f"count of {chunks}", completion.final.eval_count, len(chunks))


@OUTPUT.case(49, "utf8-tail", wire)
async def incomplete_bytes_at_the_end_are_counted_but_not_shown(target: Target) -> None:
    """Bytes of an incomplete character at the end are counted, not shown."""
    expect("text, reason, count", ended(await target.complete(Request("<tail>"))), ("", STOP, 1))


@OUTPUT.case(50, "stop-strings", wire, sends("stop"))
async def stop_strings_end_the_text_or_do_nothing(target: Target) -> None:
    """A stop string is ignored, or ends the answer before it with reason stop."""
    completion = await target.complete(Request("Hi", {"stop": ["lmn"]}))
    expect("reason", completion.final.done_reason, STOP)
    assert completion.text in ("jk", ALPHABET), f"the text is {completion.text!r}"


@OUTPUT.case(51, "failure", argv, reads("Error"))
async def a_fault_in_one_request_leaves_the_process_serving(target: Target) -> None:
    """A failure of a request, before or within its text, is an `Error` line; the next request is served."""
    fault = {"FAULT": "forward", "FAULT_TOKEN": str(token("5"))}
    async with target.spawn(environment=fault, faulty=True) as process:
        async with Client(process.port, target.generation, process.output) as client:
            for prompt in ("5...x", "0"):
                await fails(client, prompt)
                expect("the next answer", (await client.complete(Request("Hi"))).text, ALPHABET)
        expect("exit status", process.exit_status, None)
        expect("what hosts take for an error", caught(process), [])


async def fails(client: Client, prompt: str) -> None:
    """The completion ends with an `Error` object of status 500."""
    stream: Stream = client.stream(Request(prompt))
    try:
        async with stream:
            async for _ in stream:
                pass
    except StatusError as failure:
        expect("status", failure.status, 500)
        expect("whether it has a text", str(failure) != "", True)
    else:
        raise AssertionError(f"no error after {prompt!r}")
    error = json.loads(stream.lines[-1])["Error"]
    expect("its keys", sorted(error), ["Status", "StatusCode", "error"])
    expect("Status", error["Status"], "")


@OUTPUT.case(52, "both-spellings", once, beyond=True)
async def the_last_line_has_both_spellings_of_every_counter(target: Target) -> None:
    """The last line has every counter under both its names, for early hosts and for later ones."""
    reply = await target.post({"Prompt": "Hi", "Options": {"num_predict": 4}})
    body = json.loads(reply.body.splitlines()[-1])
    for later, early in SPELLINGS:
        assert later in body, f"no {later}"
        expect(f"{early} beside {later}", body.get(early), body[later])
    expect("counters", (body["DoneReason"], body["EvalCount"], body["PromptEvalCount"]), (LENGTH, 4, 2))
