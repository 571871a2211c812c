"""Every package of mlx-vlm that is served, beside mlx-vlm: loading, caches, disk, batches, drafts.

The questions are those that made the table (`record.py`)."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.model import open_model
from runner.model.weights.loading import load
from runner.model.weights.parameters import parameters_of
from runner.vlm import packages
from runner.vlm.source import VlmChoice
from scripts.tools.models import vlm
from scripts.tools.models.architectures import values
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.packages import SEEING, TEXTS
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization
from scripts.tools.models.tiny import VOCAB
from tests.model.architectures.subject import run
from tests.model.cache.test_round_states import check_rounds
from tests.vlm.texts import ABILITIES, QUESTIONS, Package

EVERY = sorted(packages.COMPARED)
LACKING = [name for name in EVERY if name in TEXTS]
"""Those that mlx-lm does not have."""


@pytest.mark.parametrize("name", EVERY)
def test_a_package_gives_the_answers_of_mlx_vlm(name: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    package = Package(name, tmp_path)
    for question in QUESTIONS:
        with subtests.test(question.__name__):
            question(package)
    for table, find in ABILITIES.items():
        with subtests.test(table):
            fault = find(*package.forward, VOCAB)
            assert (name in getattr(packages, table)) == (not fault), fault


@pytest.mark.parametrize("name", ["kimi_k3", "lfm2_vl", "minicpmv4_6", "plamo2vl"])
def test_a_recurrent_layer_stands_behind_any_token_of_a_round(name: str) -> None:
    check_rounds(vlm.build(name), place=1)


def test_every_package_of_the_list_is_in_the_table() -> None:
    assert {*packages.COMPARED, *packages.REFUSED} == {*TEXTS, *SEEING}
    assert not packages.COMPARED & packages.REFUSED.keys()


@pytest.mark.parametrize("name", ["k2_horizon", "hy_v4"])
def test_a_model_is_opened_by_its_type_from_a_directory_and_a_store(name: str, tmp_path: Path) -> None:
    package = Package(name, tmp_path)
    opened = open_model(str(package.directory), tmp_path, VlmChoice())
    assert opened.family.import_name == f"mlx_vlm.models.{name}"
    assert (opened.vocab_size, opened.context_length) == (VOCAB, values(name)["max_position_embeddings"])
    assert mx.array_equal(run(load(opened).module), run(load(package.opened).module))
    write_store(tmp_path, "m", package.directory)
    stored = load(open_model("m", tmp_path, VlmChoice()), "float32").module
    assert mx.abs(run(stored) - package.expected).max() <= 1e-4 * mx.abs(package.expected).max()


@pytest.mark.parametrize("quantization", ["int8", "mxfp8"])
def test_a_packed_model_is_read_like_those_of_mlx_lm(quantization: Quantization, tmp_path: Path) -> None:
    package = Package("qwen3_vl", tmp_path)
    write_store(tmp_path, "m", package.directory, quantization)
    opened = open_model("m", tmp_path, VlmChoice())
    packed = load(opened, "float32").module
    assert any(name.endswith(".scales") for name in parameters_of(packed))


def test_a_package_that_was_not_compared_is_served_to_those_who_ask_for_it(tmp_path: Path) -> None:
    package = Package("mllama", tmp_path)
    with pytest.raises(ModelError, match=r"mllamaX, which mlx-vlm has: .*; --unproven-models serves it all the same$"):
        open_model(str(package.directory), tmp_path, VlmChoice())
    assert load(open_model(str(package.directory), tmp_path, VlmChoice(unproven=True))).module is not None


def test_a_number_of_layers_that_no_tensor_explains_is_refused(tmp_path: Path) -> None:
    package = Package("k2_horizon", tmp_path)
    package.config["num_hidden_layers"] = 1_000_000
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000, but the model has only"):
        _ = package.opened


def test_other_models_import_nothing_of_mlx_vlm(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from runner.model import open_model;"
        "from runner.vlm.source import VlmChoice;"
        "from runner.model.weights.loading import load; load(open_model(sys.argv[1], Path(), VlmChoice()));"
        "print([name for name in sys.modules if name.startswith('mlx_vlm')])"
    )
    directory = write_checkpoint(tmp_path / "plain", "llama")
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
