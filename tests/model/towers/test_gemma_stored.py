"""Whole Gemma 4 and Glimmer models that see, as directories and in stores, plain and packed."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.towers import Grid, Tower, load_tower, plan_tower
from scripts.tools.models.layouts import LAYOUTS
from scripts.tools.models.sources import Published
from scripts.tools.models.store import write_store
from scripts.tools.models.towers_gemma import SEEING
from tests.model.loading.conftest import published  # noqa: F401
from tests.model.towers.gemma_cases import distance, features, parameters

GRIDS = {"gemma4-unified-seeing": Grid(2, 3), "glimmer-seeing": Grid(6, 10)}
VALUES = {"gemma4-unified-seeing": 3 * 48**2, "glimmer-seeing": 3 * 14**2}


def tower(model: str, models_dir: Path = Path("unused")) -> Tower:
    """The tower of a model that opens without a fault."""
    plan = plan_tower(open_model(model, models_dir))
    assert plan is not None
    assert plan.fault == ""
    return load_tower(plan)


def seen(found: Tower, name: str) -> mx.array:
    """The features of a picture of noise."""
    grid = GRIDS.get(name, Grid(6, 9))
    mx.random.seed(3)
    patches = mx.random.randint(0, 256, (grid.patches, VALUES.get(name, 3 * 16**2))).astype(mx.uint8)
    return features(found, patches, grid)


@pytest.mark.parametrize("name", SEEING)
def test_a_directory_and_a_store_hold_the_same_tower(published: Published, tmp_path: Path, name: str) -> None:  # noqa: F811
    directory = published(name)
    write_store(tmp_path, "seeing", directory, "int4")  # whose towers stay plain
    from_directory, from_store = tower(str(directory)), tower("seeing", tmp_path)
    arrays = cast("dict[str, mx.array]", mx.load(str(directory / "model.safetensors")))
    named = {key: array for stored, array in arrays.items() if (key := from_directory.parameter_name(stored))}
    assert named.keys() == parameters(from_directory).keys()
    wanted = seen(from_directory, name)
    assert wanted.shape[1] == 64
    assert mx.isfinite(wanted).all()
    assert mx.array_equal(seen(from_store, name), wanted)


@pytest.mark.parametrize("name", ["gemma4-seeing", "gemma4-moe-seeing"])  # the others were never packed
def test_an_old_store_holds_a_packed_tower(published: Published, tmp_path: Path, name: str) -> None:  # noqa: F811
    directory = published(name)
    write_store(tmp_path, "seeing", directory, "int8", layout=LAYOUTS["0.31.2"])
    packed = tower("seeing", tmp_path)
    assert any(key.endswith(".scales") for key in parameters(packed))
    assert 0 < distance(seen(packed, name), seen(tower(str(directory)), name)) < 0.3
