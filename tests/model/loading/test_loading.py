"""The cost of loading: open files, memory, bytes read, imports; and its log lines."""

import logging
import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from runner.commands.check.trial import batch_fault, draft_fault
from runner.model import OpenedModel, open_model
from runner.model.architectures import UNBATCHABLE
from runner.model.weights.loading import LoadedModel, load
from runner.model.weights.parameters import building_only
from scripts.tools.models.checkpoints import VOCABULARY_SIZE, Dtype, Kind, config_of, write_checkpoint, write_directory
from scripts.tools.models.store import Store, write_store
from tests.lib.memory import held_bytes
from tests.model.loading.conftest import Checkpoints, bytes_read, experts_apart, run, run_path, same


def open_files() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208  # counts, and opens nothing that stays


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of more blobs than may be open at once, under the name `deep`."""
    root = tmp_path_factory.mktemp("deep")
    source = write_checkpoint(root / "source", "llama", overrides={"num_hidden_layers": 30})
    return write_store(root / "models", "deep", source)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tensor for each of 32 experts, in more shards than may be open at once.

    They are nearly all of its five megabytes; a stack is a quarter of that.
    """
    directory = tmp_path_factory.mktemp("apart")
    config = config_of("qwen3_next", {"num_experts": 32, "moe_intermediate_size": 160, "num_hidden_layers": 2})
    return write_directory(directory, config, experts_apart(config), shards=100)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of ten megabytes, under the name `blobs`."""
    root = tmp_path_factory.mktemp("blobs")
    wide = {"hidden_size": 512, "intermediate_size": 1024}
    return write_store(root / "models", "blobs", write_checkpoint(root / "source", "llama", overrides=wide))


@pytest.fixture(params=["apart", "blobs", "file"])
def opened(request: pytest.FixtureRequest, apart: Path, blobs: Store) -> OpenedModel:
    """A model in each form of weights, large enough to measure its memory."""
    paths = {"apart": str(apart), "blobs": "blobs", "file": str(blobs.models_dir.parent / "source")}
    return open_model(paths[request.param], blobs.models_dir)


@pytest.mark.parametrize(("device", "dispatched"), [("cpu", 29), ("gpu", 0)])
def test_a_cpu_computes_each_layer_while_the_next_one_is_built(
    deep: Store, monkeypatch: pytest.MonkeyPatch, device: str, dispatched: int
) -> None:
    """The last layer of 30 waits for those that need its output. A sketch has nothing computed."""
    shapes = list[tuple[int, ...]]()
    monkeypatch.setattr(mx, "async_eval", lambda output: shapes.append(output.shape))
    with monkeypatch.context() as patched:
        patched.setattr("runner.model.weights.loading.device", lambda: device)
        loaded = load(open_model("deep", deep.models_dir))
    with building_only(loaded.module):
        loaded.logits(mx.array([[1, 2, 3]]), loaded.make_layers())
    assert shapes == []
    mx.eval(loaded.logits(mx.array([[1, 2, 3]]), loaded.make_layers()))
    assert len(shapes) == dispatched
    assert {shape[:2] for shape in shapes} <= {(1, 3)}


def test_few_files_that_may_be_open_are_enough(deep: Store, apart: Path) -> None:
    for path, models_dir, source in (
        ("deep", deep.models_dir, deep.models_dir.parent / "source"),
        (apart, apart, apart),
    ):
        opened = open_model(str(path), models_dir)
        wanted = run_path(source)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 10, hard))
        try:
            model = load(opened)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert same(run(model), wanted)


def test_memory_stays_near_the_size_of_the_weights(opened: OpenedModel) -> None:
    mx.clear_cache()
    mx.reset_peak_memory()
    before = held_bytes()
    model = load(opened)
    assert mx.get_peak_memory() - before < 1.05 * opened.total_bytes
    assert held_bytes() - before < 1.05 * opened.total_bytes
    assert model.module is not None


@pytest.mark.skipif(not bytes_read(), reason="only Linux counts what a process reads")
def test_every_byte_is_read_once(opened: OpenedModel) -> None:
    """Except for a few kilobytes of headers, which are read again."""

    load(opened)  # imports what it needs
    before = bytes_read()
    load(opened)
    files = {part.file for tensor in opened.tensors.values() for part in tensor.parts}
    assert opened.total_bytes <= bytes_read() - before < opened.total_bytes + len(files) * 16384


def test_what_is_made_of_weights_needs_room_for_one_group_only(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stacks have to be made, each must free its parts before the next one is made."""
    opened = open_model(str(apart), apart)
    monkeypatch.setattr("runner.model.weights.loading.find_expert_stacks", lambda _, recipe: ({}, recipe))
    largest = 32 * 160 * 64 * 4
    monkeypatch.setattr("runner.model.weights.loading._MADE_BYTES", largest)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = held_bytes()
    model = load(opened)
    assert opened.total_bytes > 3 * largest
    assert mx.get_peak_memory() - before < opened.total_bytes + 1.5 * largest
    assert_nothing_is_left_to_do(model)


def assert_nothing_is_left_to_do(model: LoadedModel) -> None:
    mx.reset_peak_memory()
    held = held_bytes()
    mx.eval(model.module.parameters())
    assert mx.get_peak_memory() <= held


def test_the_log_tells_how_far_loading_is_and_counts_every_byte_once(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runner.model.weights.reading._READ_BYTES", 1)  # every array is one large array
    monkeypatch.setattr("runner.model.progress._EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "runner.model.weights.loading"):
        load(opened)
    told = [record.__dict__["attributes"] for record in caplog.records]
    alone = sum(".experts." not in name for name in opened.tensors)
    stacks = (len(opened.tensors) - alone) // 32
    assert len(told) == stacks + alone
    done = [line["bytes"] for line in told]
    assert done == sorted(set(done))
    assert done[-1] == opened.total_bytes
    assert {line["total"] for line in told} == {opened.total_bytes}
    assert told[-1]["percent"] == 100
    assert all(line["seconds"] >= 0 for line in told)


def python(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True).stdout


def test_a_forward_finds_submodules_without_mlx_lookup(opened: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, found = load(opened), list[object]()

    def lookup(module: Module, name: str) -> object:
        found.append(module[name])
        return found[-1]

    monkeypatch.setattr(Module, "__getattr__", lookup)
    loaded.logits(mx.array([[1]]), loaded.make_layers())
    assert [type(value) for value in found if not isinstance(value, mx.array)] == []


def test_opening_needs_no_mlx_and_loading_no_transformers(store: Store) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.model import open_model\n"
        "opened = open_model('tiny', Path(sys.argv[1]))\n"
        "print('mlx.core' in sys.modules, 'numpy' in sys.modules)\n"
        "from runner.model.weights.loading import load; load(opened)\n"
        "print(*(name in sys.modules for name in ('transformers', 'huggingface_hub', 'numpy', 'mlx_lm.utils')))"
    )
    assert python(code, str(store.models_dir)).splitlines() == ["False False", "False False False False"]


@pytest.mark.parametrize("name", UNBATCHABLE)
def test_a_module_whose_rows_need_to_be_alone_says_why(name: str) -> None:
    assert find_spec(f"mlx_lm.models.{name}") is not None, "mlx-lm has no such module"
    for module, wanted in ((name, UNBATCHABLE[name]), ("llama", "")):
        kind = type("Model", (Module,), {"__module__": f"mlx_lm.models.{module}"})
        assert LoadedModel(kind()).unbatchable == wanted


def test_a_model_of_which_nothing_is_known_is_served_alone() -> None:
    model = LoadedModel(type("Model", (Module,), {"__module__": "mlx_lm.models.new"})())
    assert model.unbatchable == model.undraftable == "mlx_lm.models.new was never tried: see check --verify"


@pytest.mark.parametrize("kind", ["dynamic", "linear"])
def test_rows_whose_rotary_base_depends_on_the_length_of_each_need_to_be_alone(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
    loaded = load(open_model(str(write_checkpoint(tmp_path / "m", "llama", overrides=scaling)), tmp_path))
    batches = batch_fault(loaded.make_layers, loaded.logits, VOCABULARY_SIZE)
    assert bool(batches) == bool(loaded.unbatchable) == (kind == "dynamic")
    assert loaded.undraftable == draft_fault(loaded.make_layers, loaded.logits, VOCABULARY_SIZE) == ""


@pytest.mark.parametrize(
    ("kind", "dtype", "has"),
    [("deepseek_v3", "bfloat16", True), ("deepseek_v3", "float32", False), ("llama", "bfloat16", False)],
)
def test_experts_that_a_cpu_refuses_are_known(kind: Kind, dtype: Dtype, has: bool, checkpoint: Checkpoints) -> None:
    opened = open_model(str(checkpoint(kind, dtype)), Path("unused"))
    assert load(opened).has_16_bit_experts is has
    assert not load(opened, "float32").has_16_bit_experts
