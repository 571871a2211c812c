"""What loading one rank's share costs, and how it fails. Nothing is computed here, so no group is needed."""

import os
import re
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401

# isort: split
from mlx_lm.models.llama import Model

from runner.errors import ModelError, ReadError
from runner.model import OpenedModel, open_model
from runner.model.weights.loading import LoadedModel
from runner.model.weights.parameters import parameters_of
from runner.ranks.share import load_share
from scripts.tools.models.checkpoints import config_of, make_weights, write_checkpoint, write_directory
from scripts.tools.models.store import Store, write_store
from tests.lib.memory import held_bytes
from tests.model.ranks.conftest import one_of

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 512,
}
"""Their `shard` takes heads as views of a tensor."""


SHARES = {"file": (4, 3), "blobs": (2, 1), "packed": (4, 0), "experts": (2, 1)}
"""The forms of a model, and of each the ranks and one of them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 60 MB in one file (`file`), as a store (`blobs`) and packed (`packed`), and a model of 40 MB with
    every expert in a tensor of its own, in 60 files (`experts`)."""
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / "file", "llama", overrides=WIDE)
    write_store(root, "blobs", root / "file")
    write_store(root, "packed", root / "file", "int8")
    config = config_of("deepseek_v3", EXPERTS)
    weights: dict[str, mx.array] = {}
    for name, array in make_weights(config, 0, "float32").items():
        head, found, tail = name.partition(".switch_mlp.")
        parts = {f"{head}.experts.{number}.{tail}": part for number, part in enumerate(array)} if found else {}
        weights |= parts or {name: array}
    write_directory(root / "experts", config, weights, shards=60)
    return root


def opened_as(name: str, models: Path) -> OpenedModel:
    return open_model(name if name in ("blobs", "packed") else str(models / name), models)


def nbytes(model: LoadedModel) -> int:
    return sum(array.nbytes for array in parameters_of(model.module).values())


def largest_layer(model: OpenedModel) -> int:
    """The bytes of the largest layer, or of a tensor that is in no layer."""
    sizes = Counter[str]()
    for name, tensor in model.tensors.items():
        match = re.match(r".*?layers\.\d+\.", name)
        sizes[match[0] if match else name] += tensor.nbytes
    return max(sizes.values())


@pytest.mark.parametrize(("name", "share"), SHARES.items(), ids=SHARES)
def test_memory_stays_near_the_share_and_nothing_is_left_to_be_read(
    name: str, share: tuple[int, int], models: Path
) -> None:
    opened = opened_as(name, models)
    mx.clear_cache()
    before = held_bytes()
    mx.reset_peak_memory()
    model = load_share(opened, one_of(*share))
    peak_bytes, share_bytes = mx.get_peak_memory() - before, nbytes(model)
    assert share_bytes < opened.total_bytes * (0.53 if share[0] == 2 else 0.3)
    assert peak_bytes < 1.05 * (share_bytes + largest_layer(opened))
    assert (held := held_bytes()) - before < 1.05 * share_bytes
    assert not [path for path in open_files() if path.startswith(str(opened.checkpoint.path))]
    mx.reset_peak_memory()
    mx.eval(model.module.parameters())
    assert mx.get_peak_memory() <= held


def open_files() -> list[str]:
    paths = []
    for number in os.listdir("/dev/fd"):  # noqa: PTH208  # opens nothing that stays
        try:
            paths.append(os.readlink(f"/dev/fd/{number}"))  # noqa: PTH115
        except OSError:
            paths.append("")  # the folder itself, or no link on this system
    return paths


@pytest.mark.parametrize(("ranks", "heads"), [(3, "8 attention heads"), (8, "4 key heads")])
def test_what_cannot_be_split_is_refused_before_it_is_read(
    ranks: int, heads: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened_as("file", models)
    forbid_reading(monkeypatch)
    with pytest.raises(ModelError, match=f"^{heads} cannot be split over {ranks} ranks: use 2 or 4$"):
        load_share(model, one_of(ranks))


def test_the_budget_is_for_the_share(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened_as("blobs", models)
    share_bytes = nbytes(load_share(model, one_of(2)))
    assert nbytes(load_share(model, one_of(2), budget_bytes=share_bytes)) == share_bytes
    forbid_reading(monkeypatch)
    with pytest.raises(
        ModelError, match=r"^on each of 2 ranks, the weights take \d+\.\d MB in float32, and the runner"
    ):
        load_share(model, one_of(2), budget_bytes=share_bytes - 1)


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("it was read"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def damage(store: Store, monkeypatch: pytest.MonkeyPatch, *, once_open: bool) -> Path:
    """Truncates a blob before it is opened again, or once all are open."""
    path = store.blob_of("model.layers.1.mlp.up_proj.weight")
    if not once_open:
        truncate(path)
        return path
    shard = Model.shard

    def late(module: Model, group: mx.distributed.Group) -> None:
        shard(module, group)
        if group is not None and type(group).__name__ == "_OneOf":
            truncate(path)

    monkeypatch.setattr(Model, "shard", late)
    return path


@pytest.mark.parametrize("once_open", [False, True])
def test_a_file_that_was_truncated_is_named(
    once_open: bool, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_store(tmp_path, "m", models / "file")
    model = open_model("m", tmp_path)
    path = damage(store, monkeypatch, once_open=once_open)
    with pytest.raises(ReadError, match=re.escape(str(path))):
        load_share(model, one_of(2))
