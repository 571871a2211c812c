"""A process that drafts: the same answers, its counts, and one line where a draft model cannot be used."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from protocol.stats import Stats
from scripts.tools.demo.questions import SMALL_TALK, Message, render
from scripts.tools.host.lib import Client, Process, Request, capture
from scripts.tools.models.assistants import config_of
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.dflash import DRAFT, write_dflash
from scripts.tools.models.sources import Published
from scripts.tools.models.store import Store, add_draft, manifest_path, write_store
from tests import ROOT
from tests.model.assistant.made import write
from tests.model.loading.stored import put
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.test_stats import metrics, stats

REQUESTS = [
    Request("Once upon a time", {"num_predict": 120}),
    Request("there was", {"num_predict": 120, "temperature": 0.9, "top_k": 20, "seed": 7}),
]


class Drafted(NamedTuple):
    """A model to serve, the value of `--draft`, and the name that statistics have for what drafts."""

    model: str
    models_dir: Path
    wish: str
    drafter: str


def made(directory: Path) -> Store:
    """Writes a random llama."""
    return write_store(directory / "models", "tiny", write_checkpoint(directory / "source", "llama"))


def itself(directory: Path) -> Drafted:
    """The model itself, which is right wherever it has read all."""
    draft = str(write_checkpoint(directory / "draft", "llama"))
    return Drafted("tiny", made(directory).models_dir, draft, draft)


def blocks(directory: Path) -> Drafted:
    store = made(directory)
    add_draft(store, write_dflash(directory / "blocks", DRAFT))
    return Drafted("tiny", store.models_dir, "auto", "the draft of tiny")


def head(directory: Path) -> Drafted:
    stored = put(directory, "qwen3-next", Published(directory / "published")("qwen3-next"))
    return Drafted(stored.name, stored.models_dir, "auto", "the model's own head")


def assistant(directory: Path) -> Drafted:
    name = "gemma4-unified"
    stored = put(directory, name, Published(directory / "published")(name))
    store = Store(stored.models_dir, manifest_path(stored.models_dir, name))
    add_draft(store, write(directory / "assistant", config_of("groups")), "int8")
    return Drafted(stored.name, stored.models_dir, "auto", f"the draft of {name}")


async def answers(process: Process) -> tuple[list[tuple[str, int]], Stats]:
    async with Client.of(process) as client:
        found = [await client.complete(request) for request in REQUESTS]
        return [(each.text, each.final.eval_count) for each in found], await stats(client)


@pytest.mark.parametrize("make", [itself, blocks, head, assistant], ids=lambda make: make.__name__)
async def test_a_drafter_changes_no_answer(make: Callable[[Path], Drafted], start: SpawnModel, tmp_path: Path) -> None:
    wanted = make(tmp_path)
    plain = start(wanted.model, ["--draft", "off"], models_dir=wanted.models_dir)
    drafted = start(wanted.model, ["--draft", wanted.wish], models_dir=wanted.models_dir)
    (found, told), (without, alone) = await answers(drafted), await answers(plain)
    assert found == without
    assert alone.drafts.model is None
    assert not alone.drafts.drafted.get("model")
    assert told.drafts.model is not None
    assert told.drafts.model.name == wanted.drafter
    assert told.drafts.drafted["model"] > 0
    assert told.memory.weights_bytes > alone.memory.weights_bytes
    if make is itself:
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


def test_a_wished_model_that_cannot_draft_is_one_line_and_status_1(start: SpawnModel, tmp_path: Path) -> None:
    store = made(tmp_path)
    other = write_checkpoint(tmp_path / "other", "llama")
    text = (other / "tokenizer.json").read_text()
    swapped = text.replace('": 7,', '": -,').replace('": 8,', '": 7,').replace('": -,', '": 8,')
    assert swapped != text
    (other / "tokenizer.json").write_text(swapped)
    write_store(store.models_dir, "alone", other)
    process = start("tiny", ["--draft", "alone"], models_dir=store.models_dir, ready=False)
    assert process.wait(60) == 1
    assert "Traceback" not in process.output.text
    (line,) = (line for line in process.output.lines if capture(line))
    assert line.startswith("Error: --draft alone: it has another vocabulary than the model: token 7 is ")
