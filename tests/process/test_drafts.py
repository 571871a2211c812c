"""A process with a draft model: the same answers, its counts, and one line where the model cannot be used."""

import re
from pathlib import Path

import pytest

from protocol.stats import Stats
from scripts.tools.demo.questions import SMALL_TALK, Message, render
from scripts.tools.host.lib import Client, Process, Request, capture
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.dflash import DRAFT, write_dflash
from scripts.tools.models.store import Store, add_draft, write_store
from tests import ROOT
from tests.process.conftest import SpawnModel
from tests.process.test_stats import metrics, stats

TOKENS = 150
REQUESTS = [
    Request("Once upon a time", {"num_predict": TOKENS}),
    Request("there was", {"num_predict": TOKENS, "temperature": 0.9, "top_k": 20, "seed": 7}),
    Request("a king", {"num_predict": TOKENS, "temperature": 0.7, "repeat_penalty": 1.2, "seed": 9}),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A random llama."""
    return write_store(tmp_path / "models", "tiny", write_checkpoint(tmp_path / "source", "llama"))


async def answers(process: Process) -> tuple[list[tuple[str, int]], Stats]:
    async with Client.of(process) as client:
        found = [await client.complete(request) for request in REQUESTS]
        return [(each.text, each.final.eval_count) for each in found], await stats(client)


@pytest.mark.parametrize("seed", [0, 3])
async def test_answers_are_those_without_a_draft_model(
    seed: int, store: Store, start: SpawnModel, tmp_path: Path
) -> None:
    """One of the draft models is the model itself, which is right wherever it has read all; the other one hardly ever
    is."""
    draft = write_checkpoint(tmp_path / "draft", "llama", seed=seed)
    wanted, plain = await answers(start("tiny", ["--draft", "off"], models_dir=store.models_dir))
    assert plain.drafts.model is None
    process = start("tiny", models_dir=store.models_dir, environment={"MLX_RUNNER_DRAFT": str(draft)})
    found, told = await answers(process)
    assert found == wanted
    assert told.drafts.model is not None
    assert told.drafts.model.name == str(draft)
    assert told.drafts.drafted["model"] > 0
    assert told.memory.weights_bytes > plain.memory.weights_bytes
    if seed == 0:
        assert told.drafts.accepted["model"] > 0
    async with Client.of(process) as client:
        assert (await metrics(client))["mlx_runner_drafted_tokens_total", "model"] == told.drafts.drafted["model"]
    assert process.output.text.count('msg="draft model loaded"') == 1
    for name, count in (("model_drafted", told.drafts.drafted), ("model_accepted", told.drafts.accepted)):
        assert sum(map(int, re.findall(rf" {name}=(\d+)", process.output.text))) == count["model"]


async def test_a_trained_model_drafts_what_a_larger_one_answers(start: SpawnModel) -> None:
    """Both learned the same world by themselves. No answer is known from earlier ones, nor stands in its prompt."""
    scripts = ROOT / "scripts"
    asked = [
        Request(render([Message("user", question)]), {"num_predict": 120, "temperature": 0}) for question in SMALL_TALK
    ]
    texts = []
    for wish in ("off", str(scripts / "demo_draft_model")):
        async with Client.of(start(str(scripts / "demo_model"), ["--draft", wish])) as client:
            texts.append([(await client.complete(request)).text for request in asked])
            told = (await stats(client)).drafts
    assert texts[1] == texts[0] == [*SMALL_TALK.values()]
    assert told.accepted["model"] >= 0.8 * told.drafted["model"] > 0


async def test_a_draft_beside_the_model_drafts_with_auto_and_not_without(store: Store, start: SpawnModel) -> None:
    add_draft(store, store.models_dir.parent / "source")
    for wish, name in (("off", ""), ("auto", "the draft of tiny")):
        _, told = await answers(start("tiny", ["--draft", wish], models_dir=store.models_dir))
        assert (told.drafts.model.name if told.drafts.model else "") == name
        assert bool(told.drafts.drafted.get("model")) is bool(name)


@pytest.mark.parametrize("cache", ["trie", "single"])
async def test_blocks_of_a_dflash_draft_change_no_answer(
    cache: str, store: Store, start: SpawnModel, tmp_path: Path
) -> None:
    add_draft(store, write_dflash(tmp_path / "blocks", DRAFT))
    wanted, _ = await answers(start("tiny", ["--draft", "off", "--cache", cache], models_dir=store.models_dir))
    process = start("tiny", ["--draft", "auto", "--cache", cache], models_dir=store.models_dir)
    found, told = await answers(process)
    assert found == wanted
    assert told.drafts.model is not None
    assert told.drafts.model.name == "the draft of tiny"
    assert told.drafts.drafted["model"] > 0
    assert process.output.text.count('msg="draft model loaded"') == 1


async def test_a_draft_beside_the_model_that_cannot_be_used_is_one_line(store: Store, start: SpawnModel) -> None:
    add_draft(store, store.models_dir.parent / "source")
    store.put_json("draft/config.json", {"architectures": ["DFlash2DraftModel"], "dflash_config": {}})
    process = start("tiny", ["--draft", "auto"], models_dir=store.models_dir)
    _, told = await answers(process)
    assert told.drafts.model is None
    (line,) = (line for line in process.output.lines if "draft model" in line)
    assert "DFlash2DraftModel drafts from what the model has computed, which is not supported yet" in line


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("nothing:latest", "read manifest: open "),
        ("../nowhere", "no such file or directory"),
        ("alone", "it has another vocabulary than the model: token 7 is "),
    ],
)
def test_a_wished_model_that_cannot_draft_is_one_line_and_status_1(
    wish: str, why: str, store: Store, start: SpawnModel, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", "llama")
    text = (other / "tokenizer.json").read_text()
    swapped = text.replace('": 7,', '": -,').replace('": 8,', '": 7,').replace('": -,', '": 8,')
    assert swapped != text
    (other / "tokenizer.json").write_text(swapped)
    write_store(store.models_dir, "alone", other)
    process = start("tiny", ["--draft", wish], models_dir=store.models_dir, ready=False)
    assert process.wait(60) == 1
    assert "Traceback" not in process.output.text
    (line,) = (line for line in process.output.lines if capture(line))
    assert line.startswith(f"Error: --draft {wish}: ")
    assert why in line
