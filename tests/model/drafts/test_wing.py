"""Which model drafts for another one: by `--draft`, or because it lies beside it in the store; and why one cannot."""

import json
import logging
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import msgspec
import pytest

from runner.commands.check.inspection import inspect
from runner.commands.check.report_text import as_text
from runner.drafts.dflash.drafter import BlockDrafter
from runner.drafts.drafting import DraftModel
from runner.drafts.own_model import OwnDraftModel
from runner.drafts.wing import DraftModelOpener
from runner.errors import DraftError
from runner.model import open_model
from runner.model.weights.loading import load
from runner.settings import CheckSettings, Settings
from runner.sizes import Bound
from runner.tokenizer import open_tokenizer
from scripts.tools.models.checkpoints import VOCABULARY_SIZE, write_checkpoint
from scripts.tools.models.dflash import LAGUNA, write_dflash
from scripts.tools.models.store import Store, add_draft, write_store
from tests.model.loading.test_check_text import value

LARGE = 1 << 40
REFUSALS = {
    "another vocabulary": "its vocabulary differs from the model's: token 7 is ",
    "no tokenizer": "load tokenizer config: no tokenizer.json",
    "a block of another kind": "drafts of the kind Gemma4DSparkModel are not supported; docs/drafts.md lists those",
    "not there": "no such file or directory",
    "a tensor short": "lacks 1 tensors: model.layers.0.self_attn.q_proj.weight",
    "too large": "the weights take ",
}
"""Drafts that cannot be used, and what is said of them."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A random llama."""
    return write_store(tmp_path / "models", "tiny", write_checkpoint(tmp_path / "source", "llama"))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A smaller one of the same vocabulary."""
    return write_checkpoint(tmp_path / "draft", "llama", seed=3, overrides={"num_hidden_layers": 1})


def spoil(draft: Path, how: str) -> Path:
    """Makes a model of which a table above tells what is wrong."""
    config = json.loads((draft / "config.json").read_text())
    if how == "another vocabulary":
        tokenizer = json.loads((draft / "tokenizer.json").read_text())
        entries = tokenizer["model"]["vocab"]
        seven, eight = (next(piece for piece in entries if entries[piece] == token) for token in (7, 8))
        entries[seven], entries[eight] = 8, 7
        (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif how == "no tokenizer":
        (draft / "tokenizer.json").unlink()
    elif how == "a block of another kind":
        (draft / "config.json").write_text(
            json.dumps({**config, "architectures": ["Gemma4DSparkModel"], "markov_rank": 256})
        )
    elif how == "not there":
        return draft.parent / "nowhere"
    elif how == "a tensor short":
        weights = mx.load(str(draft / "model.safetensors"))
        assert isinstance(weights, dict)
        weights = {name: mx.array(weight) for name, weight in weights.items() if "q_proj" not in name}
        mx.save_safetensors(str(draft / "model.safetensors"), weights)
    return draft


def settings(store: Store, wish: str) -> Settings:
    return Settings(
        model="tiny",
        port=0,
        models_dir=store.models_dir,
        cache="trie",
        blas="off",
        blas_threads=None,
        log_level=20,
        watch_parent=False,
        draft=wish,
    )


def opened(store: Store, wish: str, budget_bytes: int = LARGE) -> OwnDraftModel | None:
    """Goes the way of a start."""
    found = found_by(store, wish, budget_bytes)
    assert found is None or isinstance(found, OwnDraftModel)
    return found


def found_by(store: Store, wish: str, budget_bytes: int = LARGE) -> DraftModel | None:
    model = open_model("tiny", store.models_dir)
    opener = DraftModelOpener(settings(store, wish), model)
    tokenizer = open_tokenizer(model.file)
    return opener.load(load(model), tokenizer, mx.get_active_memory() + budget_bytes)


def checked(store: Store, wish: str, memory: int = LARGE) -> str:
    """Returns the report of `mlx-runner check`."""
    wanted = CheckSettings(
        model="tiny", models_dir=store.models_dir, draft=wish, memory=Bound(bytes=memory), blas="off", log_level=0
    )
    return as_text(inspect(wanted))


def test_a_wished_model_drafts_and_nothing_does_without_a_wish_or_a_draft(store: Store, draft: Path) -> None:
    found = opened(store, str(draft))
    assert found is not None
    assert found.name == str(draft)
    assert found.nbytes == 0 < found.most_bytes(8)
    write_store(store.models_dir, "small", draft)
    stored = opened(store, "small")
    assert stored is not None
    assert stored.name == "small"
    for wish in ("auto", "off"):
        assert opened(store, wish) is None
    assert f"from known text, and by {draft} (LlamaForCausalLM, float32, " in " ".join(
        checked(store, str(draft)).split()
    )
    assert value(checked(store, "auto"), "drafts") == "from known text"
    assert value(checked(store, "off"), "drafts") == "off; with --draft auto, from known text"


def test_a_draft_beside_the_model_is_used_by_itself(store: Store, draft: Path) -> None:
    add_draft(store, draft)
    found = opened(store, "auto")
    assert found is not None
    assert found.name == "the draft of tiny"
    assert opened(store, "off") is None
    assert value(checked(store, "auto"), "drafts").startswith("from known text, and by the draft of tiny (Llama")
    without = open_model("tiny", store.models_dir)
    assert not any(name.startswith("draft") for name in without.tensors)


def test_a_dflash_draft_beside_the_model_or_by_its_name(store: Store, tmp_path: Path) -> None:
    """It needs no tokenizer, and its size is known from its headers."""
    directory = write_dflash(tmp_path / "blocks", LAGUNA)
    add_draft(store, directory)
    beside, named = found_by(store, "auto"), found_by(store, str(directory))
    for found, name in ((beside, "the draft of tiny"), (named, str(directory))):
        assert isinstance(found, BlockDrafter)
        assert found.name == name
        assert found.nbytes == 0 < found.most_bytes(8)
    assert found_by(store, "off") is None
    report = " ".join(checked(store, "auto").split())
    assert f"from known text, and by the draft of tiny ({LAGUNA}, float32, " in report
    told = json.loads(msgspec.json.encode(inspect(CheckSettings(
        model="tiny", models_dir=store.models_dir, draft=str(directory), blas="off", log_level=0
    ))))["drafts"]  # fmt: skip
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    assert told["bytes"] == sum(mx.array(each).nbytes for each in weights.values())


@pytest.mark.parametrize("how", REFUSALS)
def test_a_draft_that_cannot_draft_is_refused_or_left_out(
    how: str, store: Store, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused if it is wished, left out if it lies beside the model."""
    directory = spoil(draft, how)
    wish = str(directory)
    room, memory = (1000, 437_000) if how == "too large" else (LARGE, LARGE)
    with pytest.raises(DraftError) as refused:
        opened(store, wish, room)
    assert str(refused.value).startswith(f"--draft {wish}: ")
    assert REFUSALS[how] in str(refused.value)
    report = checked(store, wish, memory)
    assert "verdict       would not load: 1 problem" in report
    assert f"--draft {wish}: " in value(report, "PROBLEM")
    assert REFUSALS[how] in value(report, "PROBLEM")
    if how in ("not there", "no tokenizer"):
        return
    add_draft(store, directory)
    caplog.set_level(logging.INFO)
    assert opened(store, "auto", room) is None
    assert [record.message for record in caplog.records if "draft" in record.message] == [
        "the draft model beside this one is not used"
    ]
    report = checked(store, "auto", memory)
    assert "verdict       would load\n" in report
    assert REFUSALS[how] in " ".join(report.split())


@pytest.mark.parametrize(("most", "same"), [(3, True), (2, False)])
def test_a_few_more_tokens_are_the_same_vocabulary(most: int, same: bool, store: Store, draft: Path) -> None:
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**added, "id": VOCABULARY_SIZE + number, "content": f"<|more {number}|>"} for number in range(3)
    ]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with patch("runner.drafts.kinds._MOST_MORE", most):
        if same:
            assert opened(store, str(draft)) is not None
        else:
            with pytest.raises(DraftError, match="its vocabulary differs from the model's: 277 tokens instead of 274"):
                opened(store, str(draft))


def test_a_model_whose_answers_cannot_be_drafted_takes_no_draft(store: Store, draft: Path) -> None:
    with (
        patch.dict("runner.model.weights.loading.UNDRAFTABLE", {"llama": "its masks look ahead"}),
        pytest.raises(DraftError, match="answers of tiny cannot be drafted: its masks look ahead"),
    ):
        opened(store, str(draft))
    with patch.dict("runner.model.weights.loading.UNDRAFTABLE", {"llama": "its masks look ahead"}):
        assert value(checked(store, "auto"), "drafts") == "none: its masks look ahead"
