"""A process that drafts: the same answers, and its counts."""

import re
from pathlib import Path

from protocol.stats import Stats
from scripts.tools.demo.questions import SMALL_TALK, Message, render
from scripts.tools.host.lib import Client, Process, Request
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store
from tests import ROOT
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.test_stats import metrics, stats

REQUESTS = [
    Request("Once upon a time", {"num_predict": 120}),
    Request("there was", {"num_predict": 120, "temperature": 0.9, "top_k": 20, "seed": 7}),
]


async def answers(process: Process) -> tuple[list[tuple[str, int]], Stats]:
    async with Client.of(process) as client:
        found = [await client.complete(request) for request in REQUESTS]
        return [(each.text, each.final.eval_count) for each in found], await stats(client)


async def test_a_draft_model_changes_no_answer(start: SpawnModel, tmp_path: Path) -> None:
    """The model itself drafts, which is right wherever it has read all."""
    draft, models_dir = str(write_checkpoint(tmp_path / "draft", "llama")), tmp_path / "models"
    write_store(models_dir, "tiny", write_checkpoint(tmp_path / "source", "llama"))
    plain = start("tiny", ["--draft", "off"], models_dir=models_dir)
    drafted = start("tiny", ["--draft", draft], models_dir=models_dir)
    (found, told), (without, alone) = await answers(drafted), await answers(plain)
    assert found == without
    assert alone.drafts.model is None
    assert not alone.drafts.drafted.get("model")
    assert told.drafts.model is not None
    assert told.drafts.model.name == draft
    assert told.drafts.drafted["model"] > 0
    assert told.memory.weights_bytes > alone.memory.weights_bytes
    assert told.drafts.accepted["model"] > 0
    async with Client.of(drafted) as client:
        assert (await metrics(client))["mlx_runner_drafted_tokens_total", "model"] == told.drafts.drafted["model"]
    for name, count in (("model_drafted", told.drafts.drafted), ("model_accepted", told.drafts.accepted)):
        assert sum(map(int, re.findall(rf" {name}=(\d+)", drafted.output.text))) == count["model"]


async def test_a_trained_model_drafts_what_a_larger_one_answers(start: SpawnModel) -> None:
    """Both learned the same world by themselves. No answer is known from earlier ones, nor stands in its prompt."""
    scripts = ROOT / "scripts"
    asked = [
        Request(render([Message("user", question)]), {"num_predict": 120, "temperature": 0}) for question in SMALL_TALK
    ]
    process = start(str(scripts / "demo_model"), ["--draft", str(scripts / "demo_draft_model")])
    async with Client.of(process) as client:
        assert [(await client.complete(request)).text for request in asked] == [*SMALL_TALK.values()]
        told = (await stats(client)).drafts
    assert told.accepted["model"] >= 0.8 * told.drafted["model"] > 0


async def test_a_known_answer_is_taken_and_goes_on(start: SpawnModel) -> None:
    texts, taken = [], []
    for flags in ((), ("--draft-known",)):
        async with Client.of(start(RANDOM, [*flags, "--draft", "off"])) as client:
            requests = [Request("Once upon a time", {"num_predict": most}) for most in (40, 60)]
            texts.append([(await client.complete(each)).text for each in requests])
            drafts = (await stats(client)).drafts
            taken.append((drafts.drafted.get("known"), drafts.accepted.get("known")))
    assert texts[0] == texts[1]
    assert taken == [(None, None), (39, 39)]
