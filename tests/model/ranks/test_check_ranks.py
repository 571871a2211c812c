"""`mlx-runner check` says over how many ranks a model can be split, and what each would hold."""

from pathlib import Path

import msgspec
import pytest

from runner.commands.check.inspection import Inspection, RankFacts, RankShare, inspect
from runner.commands.check.report_text import as_text
from runner.model import open_model
from runner.model.weights.parameters import parameters_of
from runner.ranks.share import load_share
from runner.settings import CheckSettings
from runner.sizes import Bound
from scripts.tools.models.checkpoints import Kind, write_checkpoint
from tests.model.ranks.conftest import one_of


def check(directory: Path, dtype: str = "keep", memory: Bound | None = None) -> Inspection:
    settings = CheckSettings(model=str(directory), models_dir=directory, dtype=dtype, log_level=0)
    return inspect(settings if memory is None else msgspec.structs.replace(settings, memory=memory))


def line(found: Inspection) -> str:
    (line,) = [line for line in as_text(found).splitlines() if line.startswith("ranks ")]
    return line.removeprefix("ranks").strip()


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "bfloat16"), ("deepseek_v3", "auto")])
def test_what_each_rank_would_hold_is_what_it_loads(kind: Kind, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, kind)
    found = check(tmp_path, dtype)
    opened = open_model(str(tmp_path), tmp_path)
    held = []
    for ranks in [2] if kind == "llama" else [2, 4]:
        module = load_share(opened, one_of(ranks, ranks - 1), dtype).module
        held.append(RankShare(ranks, sum(array.nbytes for array in parameters_of(module).values())))
    assert found.ranks == RankFacts(held)
    assert msgspec.to_builtins(found)["ranks"]["shares"][0] == {"ranks": 2, "bytes": held[0].bytes}


def test_the_numbers_of_ranks_stand_in_one_line(tmp_path: Path) -> None:
    assert line(check(write_checkpoint(tmp_path, "deepseek_v3"))) == "2 (360.2 KB each), 4 (272.1 KB each)"


def test_what_cannot_be_split_is_told_by_name(tmp_path: Path) -> None:
    found = check(write_checkpoint(tmp_path, "gemma3_text"))
    assert found.loads
    assert line(found) == "no: mlx_lm.models.gemma3_text cannot be split over several ranks"


def test_heads_that_no_number_divides_are_told(tmp_path: Path) -> None:
    overrides = {"num_attention_heads": 5, "num_key_value_heads": 1}
    found = check(write_checkpoint(tmp_path, "llama", overrides=overrides))
    assert line(found) == "no: 5 attention heads cannot be split over 2 ranks"
