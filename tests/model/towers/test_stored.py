"""Whole models that see, as directories and in stores: the tower beside the text model, and neither in the other."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.towers import Grid, Tower, load_tower, plan_tower
from runner.model.weights.load import load
from scripts.tools.models.layouts import LAYOUTS, plan
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.sources_towers import SEEING
from scripts.tools.models.store import Store, source_tensors, write_store
from scripts.tools.models.tensors import from_mlx, rounded, to_mlx
from tests.model.loading.conftest import published, run, same  # noqa: F401
from tests.model.towers.cases import Case
from tests.model.towers.made import features, made

_GRID = Grid(4, 6)
_QWEN, _NEMOTRON = "qwen3.5-seeing", "nemotron-omni-seeing"


def case(name: str, directory: Path) -> Case:
    return Case("qwen" if name.startswith("qwen") else "nemotron", read_config(directory), SEEING[name].spare, _GRID)


def tower(model: str, models_dir: Path = Path("unused")) -> Tower:
    found = plan_tower(open_model(model, models_dir))
    assert found is not None
    assert found.fault == ""
    return load_tower(found)


def close(left: mx.array, right: mx.array) -> bool:
    return bool(mx.abs(left - right).max() <= 1e-5 * mx.abs(right).max())


def arrays(directory: Path) -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", mx.load(str(directory / "model.safetensors")))


@pytest.mark.parametrize("name", SEEING)
def test_a_directory_and_a_store_hold_the_same_tower(published: Published, tmp_path: Path, name: str) -> None:  # noqa: F811
    directory = published(name)
    write_store(tmp_path, "seeing", directory, "int4")  # whose towers stay plain
    seen = case(name, directory)
    wanted = features(made(seen, arrays(directory)), seen)
    assert mx.array_equal(features(tower(str(directory)), seen), wanted)
    assert mx.array_equal(features(tower("seeing", tmp_path), seen), wanted)


@pytest.mark.parametrize(("name", "layout"), [(_QWEN, "0.31.2"), (_NEMOTRON, "0.20.8")])
@pytest.mark.parametrize("kind", ["int4", "int8", "nvfp4", "mxfp4", "mxfp8"])
def test_old_stores_hold_packed_towers(
    published: Published,  # noqa: F811
    tmp_path: Path,
    name: str,
    layout: str,
    kind: str,
) -> None:
    directory, old = published(name), LAYOUTS[layout]
    write_store(tmp_path, "seeing", directory, kind, layout=old)  # type: ignore[arg-type]  # a literal type
    packings = plan(source_tensors(directory), read_config(directory), kind, old).packings  # type: ignore[arg-type]
    weights = {
        key: rounded(array, packings[key]) if key in packings else array for key, array in arrays(directory).items()
    }
    assert sum(key in packings for key in SEEING[name].spare) >= 10
    seen = case(name, directory)
    assert close(features(tower("seeing", tmp_path), seen), features(made(seen, weights), seen))


def test_early_stores_renamed_and_shortened_a_qwen_tower(published: Published, tmp_path: Path) -> None:  # noqa: F811
    directory = published(_QWEN)
    write_store(tmp_path, "seeing", directory, "int4", layout=LAYOUTS["0.20.8"])
    seen = case(_QWEN, directory)
    halves = {key: array.astype(mx.bfloat16) for key, array in arrays(directory).items()}
    assert mx.array_equal(features(tower("seeing", tmp_path), seen), features(made(seen, halves), seen))


def test_a_global_scale_multiplies_a_packed_matrix(published: Published, tmp_path: Path) -> None:  # noqa: F811
    directory, layer = published(_NEMOTRON), "mlp1.1.weight"
    store: Store = write_store(tmp_path, "seeing", directory, "nvfp4", layout=LAYOUTS["0.20.8"])
    parts = to_mlx(store.tensors(layer))
    store.put_tensors(layer, from_mlx({**parts, f"{layer}.global_scale": mx.array([0.5])}))
    seen = case(_NEMOTRON, directory)
    scaled = tower("seeing", tmp_path)
    store.put_tensors(layer, from_mlx(parts))
    # Squared behind the scaled layer.
    assert close(features(scaled, seen) * 4, features(tower("seeing", tmp_path), seen))


@pytest.mark.parametrize("name", [_QWEN, _NEMOTRON])
def test_the_text_model_reads_nothing_of_the_tower(published: Published, tmp_path: Path, name: str) -> None:  # noqa: F811
    directory = published(name)
    opened = open_model(str(directory), tmp_path)
    found = plan_tower(opened)
    assert found is not None
    ours = {part for tensor in found.opened.tensors.values() for part in tensor.parts}
    text = {part for tensor in opened.tensors.values() for part in tensor.parts}
    assert ours
    assert ours.isdisjoint(text)
    blind = published(name.removesuffix("-seeing"))
    assert same(run(load(opened)), run(load(open_model(str(blind), tmp_path))))
