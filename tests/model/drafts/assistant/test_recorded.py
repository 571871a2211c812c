"""An assistant computes what transformers computes with the same tensors (recorded by `record.py`)."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.drafts.assistant import Shared
from scripts.tools.models.assistants import KINDS, VOCABULARY_SIZE, config_of
from scripts.tools.models.checkpoints import VOCABULARY_SIZE as TOKENS
from tests.model.drafts.assistant import cases
from tests.model.drafts.assistant.made import pair_of, write
from tests.model.loading.stored import Stored


def recorded() -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", mx.load(str(cases.RECORDED)))


def off(found: mx.array, wanted: mx.array) -> float:
    assert found.shape == wanted.shape
    return cast("float", (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_hidden_states_are_those_of_transformers(kind: str, target: Stored, tmp_path: Path) -> None:
    assert VOCABULARY_SIZE == TOKENS
    module = pair_of(target.open(), write(tmp_path / "assistant", config_of(kind))).assistant.module
    shared = {name: Shared(*map(mx.array, pair)) for name, pair in cases.shared().items()}
    hidden, wanted = mx.array(cases.hidden())[None, None], recorded()
    for step, row in enumerate(cases.rows()):
        logits, hidden = module(mx.array(row)[None, None], hidden, shared, mx.array([cases.PLACES - 1]))
        right, scores = wanted[f"{kind}.{step}.logits"], logits[0, 0]
        chosen = mx.isfinite(scores)
        assert chosen.sum().item() == (40 if "groups" in kind else VOCABULARY_SIZE)
        # transformers gives all others one less than the least of the chosen ones.
        least = mx.where(chosen, right, mx.inf).min()
        assert mx.all(mx.where(chosen, right >= least, mx.abs(right - least + 1) < 1e-5))
        assert off(mx.where(chosen, scores, 0), mx.where(chosen, right, 0)) <= 1e-5
        assert off(hidden[0, 0], wanted[f"{kind}.{step}.hidden"]) <= 1e-5
