"""A process that drafts: the same answers, and its counts."""

import asyncio
import re
from pathlib import Path

from protocol.stats import Stats
from scripts.tools.host.lib import Client, Process, Request
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store
from tests.process.conftest import SpawnModel
from tests.process.test_stats import stats

REQUESTS = [
    Request("Once upon a time", {"num_predict": 120}),
    Request("there was", {"num_predict": 120, "temperature": 0.9, "top_k": 20, "seed": 7}),
    Request("Once upon a time", {"num_predict": 120}),
]


TOGETHER = [
    Request(f"{place} upon a time", {"num_predict": 150, "temperature": 0.5 * (place % 2), "seed": place})
    for place in range(4)
]


async def answers(process: Process) -> tuple[list[tuple[str, int]], Stats]:
    async with Client.of(process) as client:
        found = [await client.complete(request) for request in REQUESTS]
        found += await asyncio.gather(*map(client.complete, TOGETHER))
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
    assert alone.drafts.drafted == {"known": 1}, "the first token of a prompt that comes again"
    assert told.drafts.model is not None
    assert told.drafts.model.name == draft
    assert told.drafts.drafted["model"] > 0
    assert told.memory.weights_bytes > alone.memory.weights_bytes
    assert told.drafts.accepted["model"] > 0
    assert told.drafts.accepted["known"] == told.drafts.drafted["known"] == 1
    for name, count in (("model_drafted", told.drafts.drafted), ("model_accepted", told.drafts.accepted)):
        assert sum(map(int, re.findall(rf" {name}=(\d+)", drafted.output.text))) == count["model"]
