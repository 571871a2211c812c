"""`mlx-runner check --verify` loads a model, and tries on this device what the table says of it."""

from pathlib import Path
from unittest.mock import patch

import pytest

from runner.commands.check.facts import Inspection, inspect
from runner.commands.check.text import as_text
from runner.settings import CheckSettings
from tests.model.loading.conftest import Checkpoints
from tests.model.loading.test_check_text import value

TRIAL = "runner.commands.check.trial"


def check(path: Path, dtype: str = "auto") -> Inspection:
    return inspect(CheckSettings(model=str(path), models_dir=Path("unused"), verify=True, dtype=dtype, log_level=0))


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
    module = "runner.model.weights.load"
    with patch(f"{module}.BATCHED", frozenset()), patch(f"{module}.DRAFTED", frozenset()):
        line = tried(check(checkpoint("llama")))
    reason = "never (nobody has tried mlx_lm.models.llama: see check --verify), though nothing went wrong here"
    assert line == f"answers together: {reason}; drafts: {reason}"


def test_a_model_that_cannot_compute_is_a_problem(checkpoint: Checkpoints) -> None:
    """MLX refuses 16-bit experts on CPUs."""
    (problem,) = check(checkpoint("deepseek_v3", "bfloat16"), "keep").problems
    assert problem.startswith("the model cannot compute: ")
