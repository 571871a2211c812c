"""A Gemma 4 with an assistant beside it: the same answers, drafts by the assistant, and what the flag refuses."""

from pathlib import Path

import pytest

from scripts.tools.models.assistants import config_of
from scripts.tools.models.sources import Published
from scripts.tools.models.store import Store, add_draft, manifest_path
from tests.model.assistant.made import write
from tests.model.loading.stored import put
from tests.process.conftest import SpawnModel
from tests.process.test_draft_heads import answers


@pytest.mark.parametrize("kv_bits", [[], ["--kv-bits", "8"]], ids=["plain", "packed"])
async def test_an_assistant_drafts_and_changes_nothing(kv_bits: list[str], start: SpawnModel, tmp_path: Path) -> None:
    name = "gemma4-unified"
    stored = put(tmp_path, name, Published(tmp_path / "published")(name))
    store = Store(stored.models_dir, manifest_path(stored.models_dir, name))
    add_draft(store, write(tmp_path / "assistant", config_of("groups")), "int8")
    found = {}
    for draft in ("off", "auto"):
        process = start(stored.name, ["--draft", draft, *kv_bits], models_dir=stored.models_dir)
        found[draft], drafted, model = await answers(process)
        assert model == (f"the draft of {name}" if draft == "auto" else "")
        assert bool(drafted) == (draft == "auto")
    assert found["auto"] == found["off"]
