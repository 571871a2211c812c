"""Models whose own heads draft: the same answers, drafts by the head, and one line where a head is broken."""

from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, Request
from scripts.tools.models.sources import Published
from tests.model.loading.stored import put
from tests.process.conftest import SpawnModel
from tests.process.test_stats import stats

TOKENS = 120
REQUESTS = [
    Request("Once upon a time", {"num_predict": TOKENS}),
    Request("there was", {"num_predict": TOKENS, "temperature": 0.9, "top_k": 20, "seed": 7}),
]


async def answers(process: Process) -> tuple[list[tuple[str, int]], int, str]:
    """Returns texts and lengths, the tokens that a model drafted, and the name of that model."""
    async with Client.of(process) as client:
        found = [await client.complete(request) for request in REQUESTS]
        drafts = (await stats(client)).drafts
        name = "" if drafts.model is None else drafts.model.name
        return [(each.text, each.final.eval_count) for each in found], drafts.drafted.get("model", 0), name


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "nemotron-h"])
async def test_a_head_drafts_and_changes_nothing(name: str, start: SpawnModel, tmp_path: Path) -> None:
    stored = put(tmp_path, name, Published(tmp_path / "published")(name))
    found = {}
    for draft in ("off", "auto"):
        process = start(stored.name, ["--draft", draft], models_dir=stored.models_dir)
        found[draft], drafted, model = await answers(process)
        assert model == ("the model's own head" if draft == "auto" else "")
        assert bool(drafted) == (draft == "auto")
    assert found["auto"] == found["off"]
