"""`mlx-runner check` says whether a model sees, with what, and else why not."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from runner.commands.check.facts import Inspection, inspect
from runner.commands.check.text import as_text
from runner.settings import CheckSettings
from scripts.tools.models.checkpoints import TOKENIZER
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.store import Store, write_store


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("published"))


@pytest.fixture
def store_of(published: Published, tmp_path: Path) -> Callable[[str], Store]:
    return lambda name: write_store(tmp_path / "models", "tiny", published(name))


def check(store: Store) -> Inspection:
    return inspect(CheckSettings(model="tiny", models_dir=store.models_dir, dtype="keep", log_level=0))


def line(found: Inspection) -> str:
    (line,) = [line for line in as_text(found).splitlines() if line.startswith("pictures ")]
    return line.removeprefix("pictures").strip()


@pytest.mark.parametrize(
    ("name", "told", "tokens"),
    [
        ("qwen3.5-seeing", "yes (qwen3.5 tower, 2 blocks, float32, ", 16384),
        ("qwen3.5-moe-seeing", "yes (qwen3.5 tower, 2 blocks, float32, ", 16384),
        ("gemma4-seeing", "yes (gemma4 tower, 2 blocks, float32, ", 280),
        ("gemma4-unified-seeing", "yes (gemma4 tower, float32, ", 280),
    ],
)
def test_a_model_that_sees(name: str, told: str, tokens: int, store_of: Callable[[str], Store]) -> None:
    found = check(store_of(name))
    text = line(found)
    assert found.loads
    assert text.startswith(told)
    assert text.endswith(f"; up to {tokens} tokens a picture)")
    assert "vision" not in {amount.name for amount in found.skipped or ()}, "the tower is read"
    data = msgspec.json.decode(msgspec.json.encode(found))["pictures"]
    assert (data["sees"], data["why"], data["tokens"]) == (True, None, tokens)
    assert 0 < data["bytes"] < found.read_bytes


def test_a_text_model(store_of: Callable[[str], Store]) -> None:
    assert line(check(store_of("gemma4-text"))) == "no: a text model"


def test_a_family_whose_pictures_nobody_here_knows(store_of: Callable[[str], Store], published: Published) -> None:
    store = store_of("gemma4-text")
    config = read_config(published("gemma4-text"))
    store.put_json("config.json", {**config, "vision_config": {}})
    found = check(store)
    assert found.loads
    assert line(found) == "no: pictures are not known here for the family gemma4_text"


def test_a_tower_that_is_not_whole_costs_no_text(store_of: Callable[[str], Store]) -> None:
    store = store_of("qwen3.5-seeing")
    store.drop("model.visual.blocks.1.attn.qkv.weight")
    found = check(store)
    assert found.loads
    assert line(found).startswith("no: ")
    assert "blocks.1.attn.qkv" in line(found)
    assert "vision" in {amount.name for amount in found.skipped or ()}


def test_tokens_that_stand_for_pictures_are_looked_for(store_of: Callable[[str], Store]) -> None:
    store = store_of("nemotron-omni-seeing")
    assert line(check(store)).startswith("yes ")
    store.put_json("tokenizer.json", TOKENIZER)
    assert line(check(store)).startswith("no: the tokenizer has no token '<img>'")


def test_of_a_model_with_a_problem_nothing_is_said(store_of: Callable[[str], Store]) -> None:
    store = store_of("qwen3.5-seeing")
    store.drop("model.language_model.layers.0.mlp.down_proj.weight")
    found = check(store)
    assert not found.loads
    assert found.pictures is None
    assert "\npictures" not in as_text(found)
