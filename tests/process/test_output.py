"""Conformance cases 36-52: the stream of a completion."""

import asyncio
import json
import re

import pytest

from tests.host import A, Client, F, Request, StatusError
from tests.process.conftest import FAULTY, MARKER, RANDOM, SENTENCEPIECE, SpawnModel
from tests.process.script import UTF8_VECTORS, token

ALPHABET = "jklmnopqrstuvwxyz"
STOP, LENGTH = 0, 1


async def test_case_36_absent_temperature_is_greedy(client: Client) -> None:
    first = await client.complete(Request("<equal>"))
    assert first.text == (await client.complete(Request("<equal>"))).text == "B"


async def test_case_36_greedy_answers_of_a_random_model_repeat(start: SpawnModel) -> None:
    """The same with a model whose layers matter, against a process that computes every prompt anew."""
    prompts = ["the cat and the ring", "the cat and the", "the cat and the ring, then", "another one", "the cat and"]
    texts = []
    for kind in ("trie", "single", "none"):
        process = start(RANDOM, ["--cache", kind, "--prefill-chunk", "5"])
        async with Client.of(process) as client:
            texts.append([(await client.complete(Request(prompt, {"num_predict": 24}))).text for prompt in prompts])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


async def test_case_37_without_temperature_the_filters_do_not_matter(client: Client) -> None:
    options = {"top_p": 0.1, "top_k": 2, "min_p": 0.9, "seed": 11}
    assert (await client.complete(Request("<532>", options))).text == "P"
    for seed in range(1, 6):
        completion = await client.complete(Request("W", {"top_p": 0.9, "top_k": 3, "seed": seed, "num_predict": 8}))
        assert completion.text == "W" * 8, "equal logits: the lowest id"


async def test_case_38_num_predict_is_exact(client: Client) -> None:
    completion = await client.complete(Request("Hi", {"num_predict": 5}))
    assert completion.text == "jklmn"
    assert (completion.final.done_reason, completion.final.eval_count) == (LENGTH, 5)


@pytest.mark.parametrize("num_predict", [None, 0, -1, -2])
async def test_case_39_no_limit_runs_to_the_end_of_sequence(num_predict: int | None, client: Client) -> None:
    raw = {"Prompt": "Hi", "Options": {} if num_predict is None else {"num_predict": num_predict}}
    reply = await client.send("POST", "/completion", json.dumps(raw).encode())
    final = json.loads(reply.body.splitlines()[-1])
    assert (final["DoneReason"], final["EvalCount"]) == (STOP, len(ALPHABET))


async def test_case_39_no_limit_runs_to_the_end_of_the_context(small_client: Client) -> None:
    completion = await small_client.complete(Request("<go>0"))
    assert len(completion.text) == completion.final.eval_count == 61, "64 tokens less BOS, <go> and 0"
    assert completion.final.done_reason == LENGTH
    limited = await small_client.complete(Request("<go>0", {"num_predict": 1000}))
    assert limited.final.eval_count == 61


async def test_case_40_the_end_token_is_neither_shown_nor_counted(client: Client) -> None:
    completion = await client.complete(Request("w", {"num_predict": 100}))
    assert completion.text == "xyz"
    assert (completion.final.done_reason, completion.final.eval_count) == (STOP, 3)


async def test_case_41_an_end_token_after_the_last_one_is_not_looked_at(client: Client) -> None:
    completion = await client.complete(Request("w", {"num_predict": 3}))
    assert completion.text == "xyz"
    assert (completion.final.done_reason, completion.final.eval_count) == (LENGTH, 3)


async def test_case_42_an_end_token_at_once_is_a_single_line(client: Client) -> None:
    completion = await client.complete(Request("Hi!"))
    assert len(completion.lines) == 1
    final = completion.final
    assert (final.content, final.eval_count, final.done_reason, final.prompt_eval_count) == ("", 0, STOP, 3)


async def test_case_43_counters_do_not_depend_on_the_cache(client: Client, small_client: Client) -> None:
    first = (await client.complete(Request("count these tokens a"))).final
    again = (await client.complete(Request("count these tokens a"))).final
    for final in (first, again):
        assert final.prompt_eval_count == 20
        assert final.prompt_eval_duration >= 0
        assert final.eval_duration > 0
    assert (await small_client.complete(Request("seven a"))).final.prompt_eval_count == 8, "seven and the BOS"


async def test_case_44_lines_before_the_last_are_not_done_and_have_no_counters(client: Client) -> None:
    completion = await client.complete(Request("Hi"))
    assert completion.pieces == list(ALPHABET)
    for line in completion.lines[:-1]:
        body = json.loads(line)
        assert body["Done"] is False
        assert not any(body.get(key) for key in ("EvalCount", "PromptEvalCount", "eval_count", "DoneReason"))


async def test_case_45_every_token_is_flushed_when_it_is_there(client: Client) -> None:
    completion = await client.complete(Request("5", {"num_predict": 1500}))
    assert len(completion.lines) == 1501
    first, last = completion.arrivals[0], completion.arrivals[-1]
    gaps = [b - a for a, b in zip(completion.arrivals, completion.arrivals[1:], strict=False)]
    assert last - first > 0.02, "tokens came one after the other, not at the end"
    assert max(gaps) < (last - first) / 3


async def test_case_45_long_text_is_split_into_lines_that_a_host_can_read(client: Client) -> None:
    completion = await client.complete(Request("<long>"))
    assert completion.text == "long " * 20000
    assert completion.final.eval_count == 1
    assert max(map(len, completion.lines)) < 65535
    assert len(completion.lines) > 2


async def test_case_45_many_logprobs_are_split_into_lines_that_a_host_can_read(client: Client) -> None:
    """A stop string that almost comes holds 1000 tokens back, then lets them go at once."""
    stop = "1234567890" * 100 + "x"
    completion = await client.complete(
        Request("0", {"stop": [stop], "num_predict": 1200}, logprobs=True, top_logprobs=20)
    )
    assert completion.text == "1234567890" * 120
    entries = [entry for answer in completion.answers for entry in answer.logprobs or ()]
    assert [entry.token for entry in entries] == list(completion.text)
    assert max(map(len, completion.lines)) < 65535


async def test_case_45_one_entry_that_is_too_long_does_not_end_the_stream(client: Client) -> None:
    """The token has 100,000 bytes, its entry cannot fit a line; the text must arrive all the same."""
    completion = await client.complete(Request("<long>", logprobs=True, top_logprobs=2))
    assert completion.text == "long " * 20000
    assert completion.final.eval_count == 1
    assert max(map(len, completion.lines)) < 65535


async def test_case_46_numbers_are_plain_integers(client: Client) -> None:
    reply = await client.send("POST", "/completion", b'{"Prompt":"Hi","Options":{"num_predict":30},"Logprobs":false}')
    for line in reply.body.decode().splitlines():
        numbers = re.sub(r'"(\\.|[^"\\])*"', "", line)
        assert not re.search(r"NaN|Infinity|[.eE][0-9]|\d[.eE]", numbers.replace("false", "").replace("true", ""))


async def test_case_47_special_tokens_are_text(client: Client) -> None:
    completion = await client.complete(Request("<go>"))
    assert completion.text == "<think>xyz"
    assert completion.final.prompt_eval_count == 1


async def test_case_48_the_leading_space_of_a_sentencepiece_word_is_kept(start: SpawnModel) -> None:
    async with Client.of(start(SENTENCEPIECE)) as client:
        completion = await client.complete(Request("who is it?"))
        assert completion.pieces == [" Hello", " world"]
        assert completion.final.prompt_eval_count == 10, "nothing is put in front of the prompt"
        assert await client.tokenize("a b\té") == list("a b\té".encode())


@pytest.mark.parametrize("number", range(len(UTF8_VECTORS)))
async def test_case_49_bytes_become_text_by_the_vectors(number: int, client: Client) -> None:
    chunks, emitted = UTF8_VECTORS[number]
    completion = await client.complete(Request(f"<utf8-{number}>"))
    assert completion.pieces == list(emitted)
    assert completion.final.eval_count == len(chunks)


async def test_case_49_incomplete_bytes_at_the_end_are_counted_but_not_shown(client: Client) -> None:
    completion = await client.complete(Request("<tail>", logprobs=True))
    assert completion.text == ""
    assert completion.final.eval_count == 1
    assert not any(answer.logprobs for answer in completion.answers)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["n"], "jklm"),
        (["lmn"], "jk"),
        (["zz", "pq", "mx"], "jklmno"),
        (["j"], ""),
        (["nope", "z!"], ALPHABET),
        ([""], ALPHABET),
        (["klm", "jklmn"], ""),
    ],
)
async def test_case_50_stop_strings_end_the_text_before_them(stop: list[str], text: str, client: Client) -> None:
    completion = await client.complete(Request("Hi", {"stop": stop}))
    assert completion.text == text
    assert completion.final.done_reason == STOP
    assert text.startswith("".join(completion.pieces))


async def test_case_50_what_a_stop_string_held_back_is_delivered_at_the_limit(client: Client) -> None:
    completion = await client.complete(Request("Hi", {"stop": ["lmnop"], "num_predict": 5}))
    assert completion.text == "jklmn"
    assert (completion.final.done_reason, completion.final.eval_count) == (LENGTH, 5)


async def test_case_51_a_fault_in_one_request_leaves_the_process_serving(start: SpawnModel) -> None:
    """In the prefill the fault comes before any text, in the decode after some."""
    fault = {"FAULT": "forward", "FAULT_TOKEN": str(token("5"))}
    process = start(executable=FAULTY, environment=fault)
    async with Client.of(process) as client:
        for prompt, delivered in (("5...x", 0), ("0", 5)):
            pieces = []
            with pytest.raises(StatusError, match="the forward is broken") as failure:
                async with client.stream(Request(prompt)) as stream:
                    pieces += [answer.content async for answer in stream]
            assert failure.value.status == 500
            error = json.loads(stream.lines[-1])["Error"]
            assert error.keys() == {"StatusCode", "Status", "error"}
            assert (error["StatusCode"], error["Status"]) == (500, "")
            assert len(stream.lines) - 1 <= delivered
            after = await client.complete(Request("Hi"))
            assert after.text == ALPHABET
        limited = await client.complete(Request("0", {"num_predict": 3}))
        assert limited.text == "123"
    assert process.exit_status is None
    assert process.output.captured == ""


async def test_case_52_the_last_line_has_both_spellings_of_every_counter(client: Client) -> None:
    body = json.loads((await client.complete(Request("Hi", {"num_predict": 4}))).lines[-1])
    assert body.keys() == {
        *("Content", "Done", "DoneReason", "done_reason", "PromptEvalCount", "prompt_eval_count"),
        *("PromptEvalDuration", "prompt_eval_duration", "EvalCount", "eval_count", "EvalDuration", "eval_duration"),
        *("Logprobs", "Error", "PromptEvalCachedCount"),
    }
    for camel, snake in (
        ("DoneReason", "done_reason"),
        ("PromptEvalCount", "prompt_eval_count"),
        ("PromptEvalDuration", "prompt_eval_duration"),
        ("EvalCount", "eval_count"),
        ("EvalDuration", "eval_duration"),
    ):
        assert body[camel] == body[snake]
    assert (body["Done"], body["DoneReason"], body["EvalCount"], body["PromptEvalCount"]) == (True, LENGTH, 4, 2)


async def test_case_12_a_normal_session_writes_no_marker(start: SpawnModel) -> None:
    """The model's own name is a marker, the prompts are full of them, and the hosts are of two generations."""
    process = start(MARKER, environment={"OLLAMA_DEBUG": "2"})
    async with Client.of(process) as client:
        for prompt in ("Hi", "Error: mlx: out of memory x", "panic: x"):
            await client.complete(Request(prompt, F.default_options), tokenize=True)
        await client.complete(Request("0"), cancel_after=3)
        with pytest.raises(StatusError):
            await client.complete(Request(""))
        await client.send("POST", "/Error:%20mlx:", b"x")
        await client.send("GET", "/v1/status", headers={"Origin": "error: mlx:"})
    async with Client(process.port, A) as old:
        await old.complete(Request("Hi", None))
    assert process.close() < 1.5
    assert process.output.captured == ""
    assert "Traceback" not in process.output.text


async def test_one_log_line_per_request_says_what_the_cache_did(start: SpawnModel) -> None:
    process = start()
    prompts = ("abcdefgh", "abcdefgh", "abcdXYZ!", "nothing of it!")
    async with Client.of(process) as client:
        for prompt in prompts:
            await client.complete(Request(prompt, {"num_predict": 2}))
    lines: list[dict[str, str]] = []
    async with asyncio.timeout(5):
        while len(lines) < len(prompts):
            await asyncio.sleep(0.02)
            lines = [
                {key: value.strip('"') for key, value in re.findall(r' (\w+)=("[^"]*"|\S+)', line)}
                for line in process.output.lines
                if " matched=" in line
            ]
    counts = [tuple(int(line[key]) for key in ("total", "matched", "cached", "left")) for line in lines]
    assert counts == [(8, 0, 0, 8), (8, 8, 7, 1), (8, 4, 4, 4), (14, 0, 0, 14)]
    assert [bool(line["miss"]) for line in lines] == [True, False, False, True]
