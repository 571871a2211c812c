"""`--ranks N`: several processes answer as one does, and each of them does the same."""

import asyncio
import importlib
import time
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from scripts.tools.host.lib import Client, Completion, Process, Request
from scripts.tools.host.lib.generations import G
from scripts.tools.models.architectures import architectures, config, make_module, unserved
from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.tiny_values import VOCAB
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, write_tokenizer
from tests.lib.patience import stretched
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.ranks.conftest import ODD, check_logs, followers, ticks

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ZEBRAS, ONCE = "so many words about zebras " * 9, "once upon a time " * 12
SPLIT = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_oss", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash"),
    *("longcat_flash_ngram", "minimax", "minimax_m3_vl", "ministral3", "mistral4", "prism_hadamard_qwen35", "qwen2"),
    *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "solar_open", "step3p5"),
)
"""The architectures that mlx-lm can split, and that run on this machine."""
REQUESTS = (
    Request(ZEBRAS, {"num_predict": 40}),
    Request(ONCE, {"num_predict": 20, "temperature": 0.9, "seed": 7}),
    Request(ONCE, {"num_predict": 20, "temperature": 0.8, "seed": 8, "top_k": 20, "top_p": 0.8, "min_p": 0.02}),
    Request(ZEBRAS, {"num_predict": 20, "repeat_penalty": 1.4, "repeat_last_n": 64, "presence_penalty": 0.4}),
    Request(ONCE, {"num_predict": 20, "temperature": 1.0, "seed": 3}, logprobs=True, top_logprobs=3),
    Request(ONCE, {"num_predict": 80, "stop": ["e", "qu"]}),
    Request(
        ONCE, {"num_predict": 60, "temperature": 0.5, "seed": 1}, format={"type": "json_schema", "json_schema": PERSON}
    ),
)


async def ask_all(process: Process) -> list[Completion]:
    """Asks one after the other, then all at once, then for turns of a conversation; some clients leave meanwhile."""
    async with Client.of(process) as client:
        answers = [await client.complete(request) for request in REQUESTS]
        leaving = [client.complete(Request(ONCE + mark, {"num_predict": 200}), cancel_after=5) for mark in "ab"]
        together = await asyncio.gather(*map(client.complete, REQUESTS[:5]), *leaving)
        answers += together[:5]
        talk = ZEBRAS
        for turn in range(3):
            answers.append(await client.complete(Request(talk, {"num_predict": 30})))
            talk += answers[-1].text + f" and then {turn} "
        return answers


def check_equal(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.text == other.text
        assert one.final.eval_count == other.final.eval_count
        mine, wanted = ([entry for each in answer.answers for entry in each.logprobs or ()] for answer in (one, other))
        assert [each.token for each in mine] == [each.token for each in wanted]
        assert [each.logprob for each in mine] == pytest.approx([each.logprob for each in wanted], abs=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parallel", "4"],
        ["--parallel", "4", "--cache-memory", "300K"],
        ["--kv-bits", "8", "--draft-tokens", "3"],
        ["--cache", "single", "--draft", "off"],
        ["--cache", "none", "--parallel", "3"],
    ],
    ids=" ".join,
)
async def test_two_ranks_answer_as_one(arguments: list[str], start: SpawnModel) -> None:
    alone = start(RANDOM, arguments, generation=G)
    wanted = await ask_all(alone)
    alone.kill()
    process = start(RANDOM, ["--ranks", "2", *arguments], generation=G)
    check_equal(await ask_all(process), wanted)
    told = check_logs(process, len(wanted) + 2)
    outcomes = [each["outcome"] for each in told.values()]
    assert outcomes.count("cancelled") == 2
    if arguments == ["--parallel", "4"]:
        assert sum(int(each.get("drafted", 0)) for each in told.values()) > 0
        assert sum(int(each["matched"]) for each in told.values()) > 0
        assert sum(int(each.get("forced", 0)) for each in told.values()) > 0
    if "300K" in arguments:
        assert any(int(each.get("evicted_bytes", 0)) for each in told.values())


async def test_four_ranks_answer_as_one(start: SpawnModel, wide: Path) -> None:
    alone = start(RANDOM, models_dir=wide, generation=G)
    wanted = await ask_some(alone)
    alone.kill()
    process = start(RANDOM, ["--ranks", "4"], models_dir=wide, generation=G)
    check_equal(await ask_some(process), wanted)
    assert len(followers(process)) == 3
    check_logs(process, 3, ranks=4)


async def test_the_leaders_token_counts(start: SpawnModel) -> None:
    """Machines may round differently."""
    alone = start(RANDOM, generation=G)
    wanted = await ask_some(alone)
    alone.kill()
    odd = {"ODD": "draws"}
    process = start(RANDOM, ["--ranks", "2"], executable=ODD, environment=odd, generation=G)
    check_equal(await ask_some(process), wanted)
    check_logs(process, 3)


async def ask_some(process: Process) -> list[Completion]:
    """Asks two requests at once, then one of them again."""
    async with Client.of(process) as client:
        return [*await asyncio.gather(*map(client.complete, REQUESTS[:2])), await client.complete(REQUESTS[0])]


def test_these_are_all_architectures_that_can_be_split() -> None:
    served = (name for name in architectures() if name not in unserved())
    modules = {name: importlib.import_module(f"mlx_lm.models.{name}") for name in served}
    assert tuple(name for name, module in modules.items() if hasattr(module.Model, "shard")) == SPLIT


@pytest.mark.parametrize("name", SPLIT)
async def test_an_architecture_answers_as_one(name: str, start: SpawnModel, tmp_path: Path) -> None:
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(make_module(name).parameters()))
    write_directory(tmp_path, config(name), dict(weights))
    write_tokenizer(tmp_path, byte_level(ALL_BYTES[1 : VOCAB + 1]))
    arguments = ["--context", "256"]
    texts = []
    for ranks in ([], ["--ranks", "2"]):
        process = start(str(tmp_path), [*arguments, *ranks], generation=G)
        async with Client.of(process) as client:
            requests = [
                Request("0123456789" * 4, {"num_predict": 6}),
                Request("9876543210", {"num_predict": 4, "seed": 1, "temperature": 1.0}),
            ]
            texts.append([(await client.complete(request)).text for request in requests])
            texts[-1] += [each.text for each in await asyncio.gather(*map(client.complete, requests))]
    assert texts[0] == texts[1]
    check_logs(process, 4)


async def test_ranks_that_wait_use_no_processor(start: SpawnModel) -> None:
    process = start(RANDOM, ["--ranks", "2"], generation=G)
    async with Client.of(process) as client:
        await client.complete(REQUESTS[0])
    (follower,) = followers(process)
    until_s = time.monotonic() + stretched(30)
    used = 99
    while used > 2 and time.monotonic() < until_s:  # what is tried in idle time ends
        before = ticks(follower)
        await asyncio.sleep(3)
        used = ticks(follower) - before
    assert used <= 2, "hundredths of a second in 3 s"
