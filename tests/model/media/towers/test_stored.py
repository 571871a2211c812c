"""Whole models that see, as directories and in stores: the tower beside the text model, and neither in the other."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.media.towers import Grid, Tower, load_tower, plan_tower
from runner.model import open_model
from scripts.tools.models.layouts import LAYOUTS, plan
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.sources_towers import SEEING, SEEING_GEMMAS
from scripts.tools.models.store import Store, source_tensors, write_store
from scripts.tools.models.tensors import from_mlx, rounded, to_mlx
from tests.lib.kernels import mlx_own
from tests.model.loading.conftest import parameters
from tests.model.media.towers import gemma_cases
from tests.model.media.towers.cases import Case, features, made

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
def test_a_directory_and_a_store_hold_the_same_tower(published: Published, tmp_path: Path, name: str) -> None:
    directory = published(name)
    write_store(tmp_path, "seeing", directory, "int4")  # whose towers stay plain
    seen = case(name, directory)
    wanted = features(made(seen, arrays(directory)), seen)
    assert mx.array_equal(features(tower(str(directory)), seen), wanted)
    assert mx.array_equal(features(tower("seeing", tmp_path), seen), wanted)


@pytest.mark.parametrize(
    ("name", "layout", "kind"), [(_QWEN, "0.31.2", "int4"), (_NEMOTRON, "0.20.8", "nvfp4"), (_QWEN, "0.31.2", "mxfp8")]
)
@mlx_own()
def test_old_stores_hold_packed_towers(published: Published, tmp_path: Path, name: str, layout: str, kind: str) -> None:
    directory, old = published(name), LAYOUTS[layout]
    write_store(tmp_path, "seeing", directory, kind, layout=old)  # type: ignore[arg-type]  # a literal type
    packings = plan(source_tensors(directory), read_config(directory), kind, old).packings  # type: ignore[arg-type]
    weights = {
        key: rounded(array, packings[key]) if key in packings else array for key, array in arrays(directory).items()
    }
    assert sum(key in packings for key in SEEING[name].spare) >= 10
    seen = case(name, directory)
    assert close(features(tower("seeing", tmp_path), seen), features(made(seen, weights), seen))


def test_a_global_scale_multiplies_a_packed_matrix(published: Published, tmp_path: Path) -> None:
    directory, layer = published(_NEMOTRON), "mlp1.1.weight"
    store: Store = write_store(tmp_path, "seeing", directory, "nvfp4", layout=LAYOUTS["0.20.8"])
    parts = to_mlx(store.tensors(layer))
    store.put_tensors(layer, from_mlx({**parts, f"{layer}.global_scale": mx.array([0.5])}))
    seen = case(_NEMOTRON, directory)
    scaled = tower("seeing", tmp_path)
    store.put_tensors(layer, from_mlx(parts))
    # Squared behind the scaled layer.
    assert close(features(scaled, seen) * 4, features(tower("seeing", tmp_path), seen))


GRIDS = {"gemma4-unified-seeing": Grid(2, 3), "glimmer-seeing": Grid(6, 10)}
VALUES = {"gemma4-unified-seeing": 3 * 48**2, "glimmer-seeing": 3 * 14**2}


def noise_seen(found: Tower, name: str) -> mx.array:
    """The features of a picture of noise."""
    grid = GRIDS.get(name, Grid(6, 9))
    mx.random.seed(3)
    patches = mx.random.randint(0, 256, (grid.patches, VALUES.get(name, 3 * 16**2))).astype(mx.uint8)
    return gemma_cases.features(found, patches, grid)


@pytest.mark.parametrize("name", SEEING_GEMMAS)
def test_a_directory_and_a_store_hold_the_same_tower_of_a_gemma(
    published: Published, tmp_path: Path, name: str
) -> None:
    directory = published(name)
    write_store(tmp_path, "seeing", directory, "int4")  # whose towers stay plain
    from_directory, from_store = tower(str(directory)), tower("seeing", tmp_path)
    named = {key for stored in arrays(directory) if (key := from_directory.parameter_name(stored))}
    assert named == parameters(from_directory).keys()
    wanted = noise_seen(from_directory, name)
    assert wanted.shape[1] == 64
    assert mx.isfinite(wanted).all()
    assert mx.array_equal(noise_seen(from_store, name), wanted)
