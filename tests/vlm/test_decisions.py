"""Models that decide, through `POST /v1/score`: the scores are those of mlx-vlm's own classes."""

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from transformers import PreTrainedTokenizerFast

from runner.model import open_model
from runner.model.weights.loading import load
from runner.vlm.module import import_package
from runner.vlm.source import VlmChoice
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import Client, Process, spawn
from scripts.tools.host.lib.generations import H
from scripts.tools.models import vlm_seeing
from scripts.tools.models.store import write_store
from tests.process.conftest import read_stats
from tests.vlm import decisions, oracle

STATE = "the light was red and the car did not stop"
ROWS = (
    {"type": "noul", "instructions": "did it stop?", "options": ["no", "yes"]},
    {"type": "choice", "instructions": "colour", "options": ["red: stop", "green", "blue [MASK]", "none of them"]},
    {"type": "score", "instructions": "how bad " * 9, "options": [f"level {level}" for level in range(6)]},
    {"type": "choice", "instructions": "x", "options": ["a", "z" * 60]},
    {"type": "choice", "instructions": "so many", "options": [f"option {number}" for number in range(12)]},
)
SEGMENTS = (
    "<|im_start|>system\nDecide.<|im_end|>\n<|im_start|>user\nSTATE:\n", STATE, "\n\nFIELDS:\n", "INSTRUCTION: ",
    "did it stop?", "\nOPTION 1: ", "yes", "\nOPTION 2: ", "no", "INSTRUCTION: ", "colour", "red", "green", "blue",
    "\nEND",
)  # fmt: skip
FIELDS = (
    {"type": 0, "question": [4, 5], "options": [[6, 7], [8, 9]]},
    {"type": 1, "question": [10, 11], "options": [[11, 12], [12, 13], [13, 14]]},
)
CLEF = {"max_tokens": 512, "segments": SEGMENTS, "fields": FIELDS}
LAYA = {"max_tokens": decisions.MOST, "state": STATE, "rows": [{"question": row} for row in ROWS]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("decisions")
    for package in ("laya", "clef"):
        decisions.write(package, root / "store", root / package)
    decisions.write("clef", root / "packed", root / "packed-clef", "int8")
    return root


@pytest.fixture(scope="module")
def processes(models: Path) -> Iterator[dict[str, Process]]:
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(
                spawn(
                    RUNNER, name.removeprefix("packed-"), generation=H,
                    # The kernels would round what they multiply by packed weights.
                    arguments=["--prefill-chunk", "32", *(["--kernels", "off"] if "packed" in name else [])],
                    models_dir=models / ("packed" if "packed" in name else "store"),
                )
            )
            for name in ("laya", "clef", "packed-clef")
        }  # fmt: skip
        for process in found.values():
            process.wait_ready(60)
        yield found


async def decided(process: Process, body: object) -> dict[str, Any]:
    async with Client.of(process) as client:
        reply = await client.send("POST", "/v1/score", json.dumps(body).encode())
    assert reply.status == 200, reply.body
    return dict(json.loads(reply.body))


def check_close(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]], most: float = 5e-5) -> None:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    assert (
        max(abs(a - b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True))
        < most
    )
    assert len({round(score, 3) for row in found for score in row}) > sum(map(len, found)) // 2, "they tell apart"


async def test_laya_scores_as_mlx_vlm_does(processes: dict[str, Process]) -> None:
    found = await decided(processes["laya"], LAYA)
    check_close(found["logits"], decisions.laya_scores(decisions.own("laya"), STATE, ROWS))
    assert found["input_tokens"] > 4 * len(STATE) // 2
    assert "cached_tokens" not in found


async def test_a_long_state_is_cut_as_mlx_vlm_cuts_it(processes: dict[str, Process]) -> None:
    found = await decided(processes["laya"], {**LAYA, "state": STATE * 900})
    check_close(found["logits"], decisions.laya_scores(decisions.own("laya"), STATE * 900, ROWS))
    assert found["input_tokens"] == len(ROWS) * decisions.MOST


async def test_clef_scores_as_mlx_vlm_does(processes: dict[str, Process]) -> None:
    found = await decided(processes["clef"], CLEF)
    check_close(found["logits"], decisions.clef_scores(decisions.own("clef"), SEGMENTS, FIELDS))
    assert found["cached_tokens"] == 0
    (other, _) = (await decided(processes["clef"], {**CLEF, "fields": FIELDS[::-1]}))["logits"]
    assert len(other) == 3


async def test_a_packed_clef_scores_as_one_of_the_same_values(models: Path, processes: dict[str, Process]) -> None:
    found = await decided(processes["packed-clef"], CLEF)
    own = decisions.own("clef")
    own.load_weights(decisions.unpacked(load(open_model("clef", models / "packed", VlmChoice())).module), strict=False)
    with patch("runner.model.scans.functions.available", lambda *_, **__: False):  # as without the kernels
        wanted = decisions.clef_scores(own, SEGMENTS, FIELDS)
    check_close(found["logits"], wanted)


async def test_a_d1_decides_as_mlx_vlm_does(tmp_path: Path) -> None:
    """d1 is an LFM2-VL: its rows are prompts and candidate tokens, as for any model that writes text."""
    directory = vlm_seeing.write("lfm2_vl", tmp_path / "d1")
    path = directory / "config.json"
    named = {"architectures": ["D1Model"], "auto_map": {"AutoModel": "modeling_d1.D1Model"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    write_store(tmp_path / "store", "d1", directory)
    own, asks = oracle.load(directory), import_package("d1.prompt")
    assert type(own).__module__ == "mlx_vlm.models.d1.d1"
    tokenizer = cast("Any", PreTrainedTokenizerFast).from_pretrained(directory)
    questions = [
        asks.as_question({"type": kind, "instructions": "how bad?", "criteria": [f"{kind} {n}" for n in range(5)]})
        for kind in ("choice", "score")
    ]
    rows = [
        {
            "prompt": asks.prefix_text(STATE, tokenizer.bos_token) + asks.suffix_text(tokenizer, question),
            "candidates": [*codes],
        }
        for question, codes in zip(questions, ("ABCDE", "01234"), strict=True)
    ]
    with spawn(RUNNER, "d1", generation=H, models_dir=tmp_path / "store") as process:
        process.wait_ready(60)
        found = (await decided(process, {"max_tokens": 512, "rows": rows}))["logits"]
    shares = [[math.exp(score) / sum(map(math.exp, row)) for score in row] for row in found]
    check_close(shares, own.probabilities(tokenizer, STATE, questions)[0])


async def test_many_at_once_are_as_each_alone_in_fewer_forwards(processes: dict[str, Process]) -> None:
    bodies = [{**LAYA, "state": STATE[number:]} for number in range(8)]
    async with Client.of(processes["laya"]) as client:
        alone = [await decided(processes["laya"], body) for body in bodies]
        await asyncio.sleep(0.25)
        before = (await read_stats(client)).embeddings
        together = await asyncio.gather(*(decided(processes["laya"], body) for body in bodies))
        await asyncio.sleep(0.25)
        after = (await read_stats(client)).embeddings
    for one, other in zip(alone, together, strict=True):
        check_close(other["logits"], one["logits"])
    assert after.texts - before.texts == 8 * len(ROWS)
    assert after.forwards - before.forwards <= 8 * len(ROWS) * 3 // 4, "two fit into one forward"


@pytest.mark.parametrize(
    ("package", "change", "text"),
    [
        ("laya", {"rows": []}, "invalid Laya row count or context limit"),
        ("laya", {"rows": LAYA["rows"] * 17}, "invalid Laya row count or context limit"),  # type: ignore[operator]
        ("laya", {"max_tokens": decisions.MOST + 1}, "invalid Laya row count or context limit"),
        ("laya", {"rows": [{"prompt": "x"}]}, "Laya requires structured decision inputs"),
        ("laya", {"rows": [{"question": {**ROWS[0], "type": "what"}}]}, "question 0: invalid type or number"),
        ("laya", {"rows": [{"question": {**ROWS[0], "options": ["a"]}}]}, "question 0: invalid type or number"),
        ("laya", {"max_tokens": 8}, "question 0: its options do not fit the context of 8 tokens"),
        ("clef", {"segments": SEGMENTS[:2]}, "invalid Clef question count or context limit"),
        ("clef", {"fields": []}, "invalid Clef question count or context limit"),
        ("clef", {"max_tokens": 513}, "invalid Clef question count or context limit"),
        ("clef", {"max_tokens": 9}, "Clef input has "),
        ("clef", {"fields": [{**FIELDS[0], "type": 3}]}, "invalid Clef question type or option count"),
        ("clef", {"fields": [{**FIELDS[0], "options": [[6, 7]]}]}, "invalid Clef question type or option count"),
        ("clef", {"fields": [{**FIELDS[0], "question": [1, 3]}]}, "Clef question span is outside the schema"),
        ("clef", {"fields": [{**FIELDS[0], "question": [4, 16]}]}, "Clef question span is outside the schema"),
        ("clef", {"segments": [*SEGMENTS[:4], "", *SEGMENTS[5:]]}, "Clef question span has no tokens"),
        ("clef", {"images": ["aGk="]}, "pictures are not served for Clef: send the state as text"),
        ("clef", {"fields": "x"}, "Bad Request: fields must be a list, found a string"),
    ],
)  # fmt: skip
async def test_a_request_that_makes_no_sense_is_refused(
    package: str, change: dict[str, object], text: str, processes: dict[str, Process]
) -> None:
    body = {**(LAYA if package == "laya" else CLEF), **change}
    async with Client.of(processes[package]) as client:
        reply = await client.send("POST", "/v1/score", json.dumps(body).encode())
        assert (reply.status, reply.text[: len(text)]) == (400, text)


@pytest.mark.parametrize("package", ["laya", "clef"])
async def test_nothing_else_is_made_of_texts(package: str, processes: dict[str, Process]) -> None:
    async with Client.of(processes[package]) as client:
        for path, body in (("/completion", {"Prompt": "x"}), ("/v1/embeddings", {"content": "x"})):
            reply = await client.send("POST", path, json.dumps(body).encode())
            assert reply.status == 501, reply.text


async def test_a_client_that_leaves_ends_its_texts(processes: dict[str, Process]) -> None:
    process = processes["clef"]
    long = {**CLEF, "segments": [SEGMENTS[0], "x" * 380, *SEGMENTS[2:]]}
    async with Client.of(process) as client:
        before = (await read_stats(client)).embeddings
        asked = [asyncio.ensure_future(decided(process, long)) for _ in range(40)]
        await asyncio.sleep(0.05)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await decided(process, CLEF)
        await asyncio.sleep(0.25)
        after = (await read_stats(client)).embeddings
    assert after.texts - before.texts < 40
    assert after.waiting == 0


async def test_a_request_of_many_rows_lets_others_have_a_turn(processes: dict[str, Process]) -> None:
    long = {**LAYA, "state": STATE * 9, "rows": LAYA["rows"] * 12}  # type: ignore[operator]
    many = asyncio.ensure_future(decided(processes["laya"], long))
    await asyncio.sleep(0.02)
    await decided(processes["laya"], LAYA)
    assert not many.done()
    assert len((await many)["logits"]) == 60
