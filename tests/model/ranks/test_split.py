"""Over how many ranks a model can be split, from its headers alone. `test_share.py` does what is said here."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.model import OpenedModel, open_model
from runner.model.weights.assembly import rehearse
from runner.model.weights.parameters import parameters_of
from runner.ranks.split import possible_ranks, split_fault
from scripts.tools.models.architectures import Values, config
from scripts.tools.models.checkpoints import make_weights, write_checkpoint, write_directory
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization
from tests.model.architectures.splitting import kv_share
from tests.model.loading.test_quantized import with_packed


def opened(directory: Path) -> OpenedModel:
    return open_model(str(directory), directory)


def llama(directory: Path, **overrides: object) -> OpenedModel:
    return opened(write_checkpoint(directory, "llama", overrides=overrides))


def test_key_heads_are_told_that_are_too_few(tmp_path: Path) -> None:
    model = llama(tmp_path)
    assert split_fault(model, 4) == "2 key heads cannot be split over 4 ranks: use 2"
    assert possible_ranks(model) == [2]


def test_all_numbers_that_would_do_are_told(tmp_path: Path) -> None:
    model = llama(tmp_path, num_attention_heads=12, num_key_value_heads=12, hidden_size=96, intermediate_size=96)
    assert possible_ranks(model) == [2, 3, 4, 6]
    assert split_fault(model, 8) == "12 attention heads cannot be split over 8 ranks: use 2, 3, 4 or 6"


def test_modules_that_repeat_key_heads_can_be_split_over_more_ranks(tmp_path: Path) -> None:
    known = config("qwen3_5")
    known["text_config"] = {**cast("Values", known["text_config"]), "linear_num_key_heads": 4}
    model = opened(write_directory(tmp_path, known, make_weights(known, 0, "float32")))
    assert possible_ranks(model) == [2, 4]
    assert kv_share(rehearse(model)[0], 4) < 0.5


def test_a_split_that_would_make_heads_wider_is_refused(tmp_path: Path) -> None:
    """Four heads of 24 numbers become one of 32 on each of three ranks, without a word: every shape fits."""
    model = llama(tmp_path, num_key_value_heads=4, head_dim=24, intermediate_size=96)
    assert split_fault(model, 3) == "4 attention heads cannot be split over 3 ranks: use 2 or 4"
    assert possible_ranks(model) == [2, 4]


@pytest.mark.parametrize(("quantization", "ranks"), [("int4", []), ("mxfp8", [2]), ("nvfp4", [2, 4])])
def test_packed_rows_are_cut_between_groups(quantization: Quantization, ranks: list[int], tmp_path: Path) -> None:
    """The shortest rows have 64 numbers: one group of int4, two of mxfp4, four of nvfp4."""
    source = write_checkpoint(tmp_path / "source", "llama", overrides={"num_key_value_heads": 4})
    write_store(tmp_path, "packed", source, quantization)
    model = open_model("packed", tmp_path)
    assert possible_ranks(model) == ranks
    if 4 not in ranks:
        group = 64 if quantization == "int4" else 32
        assert f"llama cannot be split over 4 ranks (packed rows would be cut within a group of {group})" in (
            split_fault(model, 4)
        )


@pytest.mark.parametrize("part", [".switch_mlp.", ".out_proj."])
def test_global_scales_are_refused(part: str, tmp_path: Path) -> None:
    """`shard` would cut them along the wrong axis, or forget them."""
    known = {**config("qwen3_5_moe"), "eos_token_id": 1}
    weights = make_weights(known, 0, "float32")
    packed, _ = with_packed(weights, part, factors=mx.ones((4 if part == ".switch_mlp." else 1,)))
    assert any("global_scale" in name for name in packed)
    model = opened(write_directory(tmp_path, known, packed))
    assert split_fault(model, 2) == "weights with a global scale cannot be split over several ranks"


def test_a_model_whose_forward_fails_is_refused_in_its_words(tmp_path: Path) -> None:
    model = llama(tmp_path)
    whole, _ = rehearse(model)
    whole.model.layers[0].self_attn.n_heads = 3
    fault = split_fault(model, 2, whole)
    assert fault.startswith("mlx_lm.models.llama, whose forward fails ([reshape] Cannot reshape array of size ")
    assert fault.endswith("), cannot be split over several ranks")


def test_collectives_are_left_as_they_were(tmp_path: Path) -> None:
    model = llama(tmp_path)
    genuine = mx.distributed.all_sum, mx.distributed.all_gather
    for ranks in (2, 3):
        split_fault(model, ranks)
    assert (mx.distributed.all_sum, mx.distributed.all_gather) == genuine


def test_the_module_that_is_tried_stays_whole(tmp_path: Path) -> None:
    model = llama(tmp_path)
    whole, _ = rehearse(model)
    before = {name: array.shape for name, array in parameters_of(whole).items()}
    assert split_fault(model, 2, whole) == split_fault(model, 2)
    assert {name: array.shape for name, array in parameters_of(whole).items()} == before
    assert whole.model.layers[0].self_attn.n_heads == 4
