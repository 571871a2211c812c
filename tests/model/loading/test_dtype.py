"""`--dtype`: converted weights, their effect on results, and when they are refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from runner import device
from runner.errors import ModelError
from runner.model import open_model
from runner.model.weights import dtype as dtype_module
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.loading import LoadedModel, load
from runner.settings import CACHE_PERCENT
from runner.sizes import Bound
from scripts.tools.models.checkpoints import Dtype
from scripts.tools.models.store import write_store
from tests.model.architectures.subject import Subject
from tests.model.loading.conftest import Checkpoints, checked, parameters
from tests.model.loading.conftest import run as run_loaded


def floats(module: Module) -> dict[str, mx.Dtype]:
    return {name: each.dtype for name, each in parameters(module).items() if mx.issubdtype(each.dtype, mx.floating)}


def load_path(path: Path, dtype: str, models_dir: Path = Path("unused")) -> LoadedModel:
    return load(open_model(str(path), models_dir), dtype)


@pytest.mark.parametrize(
    ("name", "wanted"), [("llama", "float16"), ("qwen3_next", "bfloat16"), ("deepseek_v3", "float16")]
)
def test_what_mlx_lm_keeps_out_of_conversions_keeps_its_digits(name: str, wanted: str, tmp_path: Path) -> None:
    subject = Subject(name, tmp_path)
    directory = subject.write("exact", parameters(subject.module))
    kept, shrunk = (load_path(directory, dtype).module for dtype in ("keep", wanted))
    may_shrink: Callable[[str], bool] = getattr(kept, "cast_predicate", lambda _: True)
    found, had = parameters(shrunk), parameters(kept)
    dtype = {"bfloat16": mx.bfloat16, "float16": mx.float16}[wanted]
    for path, kind in floats(kept).items():
        assert found[path].dtype == (dtype if may_shrink(path) else kind), path
        assert mx.array_equal(found[path], had[path].astype(found[path].dtype)), path
    assert all(map(may_shrink, found)) == (name != "deepseek_v3")


@pytest.mark.parametrize("quantization", ["int4", "nvfp4"])
def test_packed_weights_stay_packed_and_compute_in_float32(
    quantization: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    store = write_store(tmp_path, "m", checkpoint("llama", "bfloat16"), cast("None", quantization))
    kept, converted = (load(open_model("m", tmp_path), dtype) for dtype in ("keep", "float32"))
    packed = {name: each for name, each in parameters(kept.module).items() if each.dtype in (mx.uint32, mx.uint8)}
    assert packed
    found = parameters(converted.module)
    assert all(mx.array_equal(found[name], each) for name, each in packed.items())
    assert set(floats(converted.module).values()) == {mx.float32}
    fine, coarse = (run_loaded(model).astype(mx.float32) for model in (converted, kept))
    assert run_loaded(converted).dtype == mx.float32
    assert mx.linalg.norm(coarse - fine) < 0.05 * mx.linalg.norm(fine)
    assert store is not None


def planned(wanted: str, stored: mx.Dtype, monkeypatch: pytest.MonkeyPatch, available: int, device: str) -> DtypePlan:
    monkeypatch.setattr(dtype_module, "available_bytes", lambda: available)
    monkeypatch.setattr(dtype_module, "device", lambda: device)
    module = Module()
    module.weight = mx.zeros((300, 1000), stored)
    module.words = mx.zeros((10,), mx.uint32)
    return plan_dtypes(wanted, module)


NEEDED = (300_000 * 4 + 40) * 100 // (100 - CACHE_PERCENT)


@pytest.mark.parametrize(
    ("wanted", "stored", "available", "device", "computes"),
    [
        ("auto", mx.bfloat16, NEEDED, "cpu", "float32"),
        ("auto", mx.bfloat16, NEEDED - 1, "cpu", "bfloat16"),
        ("auto", mx.bfloat16, NEEDED, "gpu", "bfloat16"),
        ("auto", mx.float32, 0, "cpu", "float32"),
        ("keep", mx.bfloat16, NEEDED, "cpu", "bfloat16"),
        ("float32", mx.bfloat16, 0, "gpu", "float32"),
        ("float16", mx.float32, 0, "cpu", "float16"),
    ],
)
def test_device_and_memory_decide_without_a_flag(
    wanted: str, stored: mx.Dtype, available: int, device: str, computes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(wanted, stored, monkeypatch, available, device)
    assert found.computes == computes
    assert str(found.dtype_of("weight", stored)) == f"mlx.core.{computes}"
    assert found.dtype_of("words", mx.uint32) == mx.uint32
    assert bool(found.lacking) == (available == NEEDED - 1)


@pytest.mark.parametrize(
    ("wanted", "stored"), [("auto", "bfloat16"), ("keep", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")]
)
def test_check_tells_what_loading_makes(wanted: str, stored: Dtype, checkpoint: Checkpoints) -> None:
    path = checkpoint("llama", stored)
    found = checked(path, dtype=wanted)
    model = load_path(path, wanted)
    assert found.weights is not None
    assert found.computes is not None
    assert sum(amount.bytes for amount in found.weights) == sum(
        array.nbytes for array in parameters(model.module).values()
    )
    assert {f"mlx.core.{found.computes.dtype}"} == {str(kind) for kind in floats(model.module).values()}
    assert found.read_bytes == open_model(str(path), Path("unused")).total_bytes


def test_weights_beyond_the_budget_are_refused_with_the_numbers_and_in_the_same_words(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama", "bfloat16")
    opened = open_model(str(directory), Path("unused"))
    with pytest.raises(ModelError) as raised:
        load(opened, "keep", 200_000)
    for part in ("the weights take 218.2 KB in bfloat16", "may use 200.0 KB in all", "allow more with --memory"):
        assert part in str(raised.value)
    found = checked(directory, dtype="keep", memory=Bound(200_000))
    assert (found.loads, found.problems) == (False, [str(raised.value)])
    assert load(opened, "keep", 10**9).module


def write_system(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:    1000 kB\nSwapFree: 7 kB\n"}, 1000 << 10),
        ({"proc/meminfo": "MemAvailable: 1000 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 1000 << 10),
        ({"proc/meminfo": "MemAvailable: 1000 kB\n", "sys/fs/cgroup/memory.max": "5000\n"}, 5000),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "6000\n"}, 6000),
        ({"proc/meminfo": "MemAvailable: 1 kB\n", "sys/fs/cgroup/memory.max": "5000\n"}, 1024),
    ],
)
def test_memory_is_what_the_machine_and_the_container_have(
    files: Mapping[str, str], wanted: int | None, tmp_path: Path
) -> None:
    found = device.available_bytes(write_system(tmp_path, files))
    assert found == (device.available_bytes(tmp_path / "nothing") if wanted is None else wanted)
    assert found > 0
