"""`check` reports every fault of every tensor; serving ends with the first one."""

import re
from pathlib import Path

import pytest

from runner.commands.check.facts import inspect
from runner.errors import ModelError
from runner.model.weights.load import load
from runner.settings import CheckSettings
from scripts.tools.models.store import Store, write_store
from tests.model.loading.conftest import Checkpoints, open_stored
from tests.model.loading.malformed import WEIGHT, Break, cut, with_layer, without, without_blob, zeros

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def problems(store: Store) -> list[str]:
    return inspect(CheckSettings(model="tiny", models_dir=store.models_dir, log_level=0)).problems


def put(name: str, dtype: str, *shape: int) -> Break:
    return lambda store: store.put_tensors(name, {name: zeros(dtype, *shape)})


def test_missing_unknown_and_misshaped_tensors_are_all_told(store: Store) -> None:
    for spoil in (
        put(WEIGHT, "F32", 32, 64),
        put(NORM, "F32", 63),
        put(UP, "I32", 128, 64),
        without(DOWN),
        put("model.layers.0.surprise.weight", "F32", 2),
    ):
        spoil(store)
    found = problems(store)
    wanted = {
        f"tiny lacks 1 tensors: {re.escape(DOWN)}",
        r"tiny holds 1 tensors that mlx_lm\.models\.llama does not know: model\.layers\.0\.surprise\.weight",
        rf".*: tensor {WEIGHT}: want shape \[64, 64\], found \[32, 64\]",
        rf".*: tensor {NORM}: want shape \[64\], found \[63\]",
        rf".*: tensor {UP}: want a floating-point type, found int32",
    }
    assert len(found) == len(wanted)
    assert all(any(re.fullmatch(line, problem) for problem in found) for line in wanted), found
    with pytest.raises(ModelError, match=f"^{re.escape(found[0])}$"):
        load(open_stored(store))


@pytest.mark.parametrize(
    "spoil", [without_blob(WEIGHT), cut(WEIGHT), with_layer(digest="sha256:.."), with_layer(digest="..", name=WEIGHT)]
)
def test_what_is_readable_is_compared_though_a_blob_is_lost(spoil: Break, store: Store) -> None:
    put(UP, "F32", 1, 1)(store)
    without(DOWN)(store)
    spoil(store)
    blob, missing, misshaped = problems(store)
    assert f"layer {WEIGHT}" in blob or f"of layer '{WEIGHT}'" in blob
    assert missing == f"tiny lacks 1 tensors: {DOWN}"
    assert re.fullmatch(rf".*: tensor {UP}: want shape .*", misshaped)


def test_every_packed_tensor_that_fits_no_packing_is_told(checkpoint: Checkpoints, tmp_path: Path) -> None:
    store = write_store(tmp_path, "tiny", checkpoint("llama"), "int8")
    for name in (WEIGHT, UP):
        parts = store.tensors(name)
        rows = parts[name].shape[0]
        store.put_tensors(name, {**parts, name: zeros("U32", rows, 5)})
    found = problems(store)
    assert [re.sub(r".*: tensor ", "", problem) for problem in found] == [
        f"{name}: 5 packed words and 1 scales a row match no quantization of 64 inputs" for name in (WEIGHT, UP)
    ]


def test_a_lost_file_explains_what_its_module_calls_otherwise(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A shard of a directory without an index might have held any tensor."""
    source = checkpoint("llama")
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model-00001-of-00002.safetensors").symlink_to(source / "model.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"broken")
    found = inspect(CheckSettings(model=str(tmp_path), models_dir=tmp_path, log_level=0))
    assert len(found.problems) == 1
    assert not found.loads
    assert found.parameters == inspect(CheckSettings(model=str(source), models_dir=tmp_path, log_level=0)).parameters
