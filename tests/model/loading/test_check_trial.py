"""`mlx-runner check --verify` loads a model, and tries on this device what the table says of it."""

import shutil
from math import inf, nan
from pathlib import Path
from typing import cast
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.commands.check.inspection import Inspection
from runner.commands.check.report_text import as_text
from runner.model.weights.loading import LoadedModel
from tests.model.loading.conftest import Checkpoints, checked
from tests.model.loading.test_check_text import value

TRIAL = "runner.commands.check.trial"


def check(path: Path, dtype: str = "auto") -> Inspection:
    return checked(path, verify=True, dtype=dtype)


def tried(found: Inspection) -> str:
    assert found.loads
    return value(" ".join(as_text(found).split("\n" + " " * 14)), "tried here")


def test_a_device_that_agrees_with_the_table(checkpoint: Checkpoints) -> None:
    found = check(checkpoint("llama"))
    assert tried(found) == "answers together: right; drafts: right"
    assert not found.warnings
    never = "never (mlx-lm has no batch of its chunked layers)"
    assert tried(check(checkpoint("llama4"))) == f"answers together: {never}; drafts: right"


@pytest.mark.parametrize(
    ("trial", "line", "flag"),
    [
        ("batch_fault", "answers together: wrong on this device; drafts: right", "--parallel 1"),
        ("draft_fault", "answers together: right; drafts: wrong on this device", "--draft off"),
        ("rounds_fault", "answers together: right; drafts: wrong on this device", "--draft off"),
    ],
)
def test_a_device_on_which_something_goes_wrong(trial: str, line: str, flag: str, checkpoint: Checkpoints) -> None:
    with patch(f"{TRIAL}.{trial}", lambda *_: "the logits of a trial are off by 0.70"):
        found = check(checkpoint("llama"))
    assert tried(found) == line
    (warning,) = found.warnings
    assert "(the logits of a trial are off by 0.70): serve this model with " + flag in warning


def test_what_the_table_does_not_have_is_tried_and_served_alone(checkpoint: Checkpoints) -> None:
    with patch("runner.model.weights.loading.TRIED", frozenset()):
        line = tried(check(checkpoint("llama")))
    reason = "never (mlx_lm.models.llama was never tried: see check --verify), though nothing went wrong here"
    assert line == f"answers together: {reason}; drafts: {reason}"


def test_a_model_that_cannot_compute_is_a_problem(checkpoint: Checkpoints) -> None:
    """MLX refuses 16-bit experts on CPUs."""
    (problem,) = check(checkpoint("deepseek_v3", "bfloat16"), "keep").problems
    assert problem.startswith("the model cannot compute: ")


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_tensor_that_holds_no_numbers_is_named(
    value: float, tmp_path: Path, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.model.weights.parameters._PIECE", 10)
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "damaged")
    (file,) = directory.glob("*.safetensors")
    weights = cast("dict[str, mx.array]", mx.load(str(file)))
    name = max(weights, key=lambda each: ("norm" in each, each))
    weights[name][-1] = value
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)
    found = check(directory)
    assert not found.loads
    (problem,) = found.problems
    assert problem.startswith(f"tensor {name}: want numbers, found NaN or infinity: fetch the model again")


def test_a_model_whose_values_exceed_their_type_is_a_problem(checkpoint: Checkpoints) -> None:
    """All weights are numbers, and what is computed with them is not."""
    plain = LoadedModel.logits
    with patch.object(LoadedModel, "logits", lambda *each: plain(*each) * 3e38):
        (problem,) = check(checkpoint("llama")).problems
    assert problem.startswith("the model computes NaN or infinity, though its weights are numbers: ")
