"""Separate experts of a source are read straight into the stacks of the module."""

import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.model import OpenedModel, open_model
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.sources.safetensors import HeaderEntry, read_tensor_header
from runner.model.weights.assembly import rehearse
from runner.model.weights.expert_reader import ExpertReader, ExpertStacks, find_expert_stacks, outside_stacks
from runner.model.weights.loading import load
from runner.model.weights.packed import Recipe
from runner.model.weights.parameters import parameters_of
from scripts.tools.models.sources import Published
from scripts.tools.models.tensors import from_mlx, mlx_style_bytes
from tests.model.loading.conftest import same

NAMES = ["qwen3-moe", "qwen3-next", "deepseek-v3", "nemotron-h"]
STACK = "model.layers.1.mlp.experts.up_proj.weight"
"""Of qwen3-moe: twelve experts, a layer with stacks and one without."""
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


@pytest.fixture
def opened(published: Published) -> OpenedModel:
    return open_directory(published("qwen3-moe"))


def open_directory(directory: Path) -> OpenedModel:
    return open_model(str(directory), directory)


def found_in(opened: OpenedModel, recipe: Recipe | None = None) -> ExpertStacks:
    return find_expert_stacks(opened, recipe or rehearse(opened)[1])[0]


def changed(opened: OpenedModel, name: str, change: Callable[[HeaderEntry], HeaderEntry]) -> OpenedModel:
    tensor = opened.tensors[name]
    return opened._replace(tensors={**opened.tensors, name: tensor._replace(weight=change(tensor.weight))})


def test_the_experts_of_a_stack_come_in_the_order_of_their_numbers(opened: OpenedModel) -> None:
    found = found_in(opened)
    assert list(found) == [STACK.replace("up", projection) for projection in ("down", "gate", "up")]
    assert [tensor.name for tensor in found[STACK]] == [EXPERT.format(number) for number in range(12)]
    assert outside_stacks(opened.tensors, found).keys() == {name for name in opened.tensors if ".experts." not in name}


def test_a_stack_has_experts_that_are_alike(opened: OpenedModel) -> None:
    """The remaining experts of their kind stay separate; the other stacks are still read as stacks."""
    changes: list[Callable[[HeaderEntry], HeaderEntry]] = [
        lambda entry: entry._replace(dtype="BF16"),
        lambda entry: entry._replace(shape=entry.shape[::-1] if len(set(entry.shape)) > 1 else (1, *entry.shape)),
    ]
    for change in changes:
        found = found_in(changed(opened, EXPERT.format(5), change), Recipe("as stored"))
        assert len(found) == 2
        assert STACK not in found


def test_there_are_no_stacks_where_sanitize_would_see_other_names(opened: OpenedModel) -> None:
    gap = {name: tensor for name, tensor in opened.tensors.items() if name != EXPERT.format(3)}
    recipe = Recipe("as stored")
    assert find_expert_stacks(opened._replace(tensors=gap), recipe) == ({}, recipe)
    stored = "model.layers.0.mlp.experts.up_proj.weight"
    weight = HeaderEntry(Path("x"), stored, "F32", (12, 64, 64))
    beside = opened._replace(tensors={**opened.tensors, stored: LogicalTensor(stored, weight)})
    assert find_expert_stacks(beside, recipe) == ({}, recipe)
    assert len(found_in(beside, Recipe("apart"))) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_module_is_the_same_whether_its_stacks_were_read_or_made(
    name: str, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_directory(published(name))
    assert found_in(opened)
    read = parameters_of(load(opened).module)
    monkeypatch.setattr("runner.model.weights.loading.find_expert_stacks", lambda _, recipe: ({}, recipe))
    made = parameters_of(load(opened).module)
    assert read.keys() == made.keys()
    assert all(same(array, made[key]) for key, array in read.items())


def write_experts(folder: Path, count: int = 5) -> tuple[list[LogicalTensor], list[list[mx.array]]]:
    """Packed experts with a factor each, two to a file, in MLX's unaligned form; and their arrays by role."""
    shapes = {"": (4, 8), ".scale": (4, 2), ".bias": (4, 2), ".global_scale": ()}
    kinds = (mx.uint32, mx.bfloat16, mx.bfloat16, mx.float32)
    roles: list[list[mx.array]] = [[], [], [], []]
    tensors: list[LogicalTensor] = []
    for first in range(0, count, 2):
        arrays: dict[str, mx.array] = {}
        for number in range(first, min(first + 2, count)):
            for role, ((suffix, shape), kind) in enumerate(zip(shapes.items(), kinds, strict=True)):
                arrays[f"{number}{suffix}"] = array = (100 * mx.random.uniform(shape=shape)).astype(kind)
                roles[role].append(array)
        path = folder / f"{first}.safetensors"
        path.write_bytes(mlx_style_bytes(from_mlx(arrays)))
        entries = read_tensor_header(path)
        tensors += [
            LogicalTensor(str(number), *(entries[f"{number}{suffix}"] for suffix in shapes))
            for number in range(first, min(first + 2, count))
        ]
    return tensors, roles


def test_every_role_is_stacked_byte_for_byte(tmp_path: Path) -> None:
    tensors, roles = write_experts(tmp_path)
    reader = ExpertReader()
    for found, parts in zip(reader.read_stack(tensors), roles, strict=True):
        assert found is not None
        assert found.dtype == parts[0].dtype
        assert mx.array_equal(found, mx.stack(parts))
    plain = reader.read_stack([LogicalTensor(tensor.name, tensor.weight) for tensor in tensors])
    assert plain[1:] == (None, None, None)
    reader.close()


def test_a_system_that_reads_in_small_pieces_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads 2 GiB at most at a time."""

    class Slow(FileIO):
        def readinto(self, memory: memoryview) -> int:  # type: ignore[override]  # what the reader gives it
            return super().readinto(memory[:7])

    tensors, roles = write_experts(tmp_path)
    reader = ExpertReader()
    reader.read_stack(tensors)
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Slow(path))
    assert mx.array_equal(reader.read_stack(tensors).weight, mx.stack(roles[0]))


def test_a_file_changed_since_it_was_opened_is_named(opened: OpenedModel, tmp_path: Path) -> None:
    name = EXPERT.format(7)
    other = tmp_path / "other.safetensors"
    model = changed(opened, name, lambda entry: entry._replace(file=other))
    other.write_bytes(bytes(100))
    with pytest.raises(ModelError, match=rf"^{other}: the header is not JSON"):
        load(model)
    other.write_bytes(mlx_style_bytes(from_mlx({name: mx.zeros((2, 2))})))
    with pytest.raises(ModelError, match=rf"^{other}: tensor {name} has changed since the model was opened$"):
        load(model)


def test_reading_leaves_no_threads(opened: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    load(opened)
    assert started
    assert not any(thread.is_alive() for thread in started)
