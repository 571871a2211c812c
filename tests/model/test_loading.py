"""What loading costs: files open at once, memory, bytes read, what is imported; and what it says while it goes on."""

import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.load import load
from tests.model.conftest import Checkpoints, run, run_path, same
from tests.models.checkpoints import config_of, make_weights, write_checkpoint, write_weights
from tests.models.store import TENSOR, Store, Tensor, write_store


def open_files() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208  # counts, and opens nothing that stays


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of more blobs than may be open at once, under the name `deep`."""
    root = tmp_path_factory.mktemp("deep")
    source = write_checkpoint(root / "source", "llama", overrides={"num_hidden_layers": 30})
    return write_store(root / "models", "deep", source)


def test_open_files_are_bounded(deep: Store) -> None:
    blobs = sum(layer["mediaType"] == TENSOR for layer in deep.layers)
    opened = open_model("deep", deep.models_dir)
    before = open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 80, hard))
    try:
        model = load(opened)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert blobs > 240
    assert open_files() == before
    assert same(run(model), run_path(deep.models_dir.parent / "source"))


def test_memory_stays_near_the_size_of_the_weights(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", overrides={"hidden_size": 512, "intermediate_size": 1024})
    opened = open_model(str(source), tmp_path)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = load(opened)
    assert mx.get_peak_memory() - before < 1.1 * opened.total_bytes
    assert mx.get_active_memory() - before < 1.1 * opened.total_bytes
    assert model.module is not None


def test_stacking_experts_needs_room_for_one_group_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face keeps experts apart, mlx-lm stacks them: each stack must let its parts go before the next one."""
    config = config_of("qwen3_next", {"num_experts": 16, "moe_intermediate_size": 256})
    directory = write_checkpoint(tmp_path / "source", "qwen3_next", overrides=config)
    expected = run_path(directory)
    weights: dict[str, mx.array] = {}
    for name, array in make_weights(config, 0, "float32").items():
        if ".switch_mlp." in name:
            head, tail = name.split(".switch_mlp.")
            weights |= {f"{head}.experts.{index}.{tail}": part for index, part in enumerate(array)}
        elif name.endswith(("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")):
            weights[name] = array - 1.0
        else:
            weights[name] = array.moveaxis(1, 2) if "conv1d.weight" in name else array
    write_weights(directory, weights)
    del weights
    opened = open_model(str(directory), tmp_path)
    largest = 16 * 256 * 64 * 4
    monkeypatch.setattr("runner.model.load._GROUP_BYTES", largest)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = load(opened)
    assert opened.total_bytes > 9 * largest
    assert mx.get_peak_memory() - before < opened.total_bytes + 2.5 * largest
    assert mx.allclose(run_path(directory), expected, atol=1e-4)
    assert model.module is not None


def test_only_what_the_text_model_needs_is_read(checkpoint: Checkpoints, tmp_path: Path) -> None:
    store = write_store(tmp_path, "m", checkpoint("gemma3"))
    plain = open_model("m", tmp_path)
    before = run_path("m", tmp_path)
    for name in (
        *("vision_tower.encoder.weight", "model.vision_tower.x.weight", "multi_modal_projector.y.weight"),
        *("mtp.layers.0.weight", "language_model.model.layers.0.self_attn.rotary_emb.inv_freq", "draft.norm.weight"),
    ):
        store.put_tensors(name, {name: Tensor("F32", (1024,), bytes(4096))})
    store.put_tensors("of another name", {"draft.model.norm.weight": Tensor("F32", (1024,), bytes(4096))})
    opened = open_model("m", tmp_path)
    assert opened.total_bytes == plain.total_bytes
    assert opened.tensors.keys() == plain.tensors.keys()
    assert same(run_path("m", tmp_path), before)


def test_the_log_tells_how_far_loading_is_and_counts_every_byte_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runner.model.load._GROUP_TENSORS", 4)
    monkeypatch.setattr("runner.model.load._LOG_EVERY_S", 0.0)
    opened = open_model("tiny", store.models_dir)
    with caplog.at_level(logging.INFO, "runner.model.load"):
        load(opened)
    told = [record.__dict__["attributes"] for record in caplog.records]
    assert len(told) == -(-len(opened.tensors) // 4)
    done = [line["bytes"] for line in told]
    assert done == sorted(set(done))
    assert done[-1] == opened.total_bytes
    assert {line["total"] for line in told} == {opened.total_bytes}
    assert all(line["seconds"] >= 0 for line in told)


def python(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True).stdout


def test_opening_needs_no_mlx_and_loading_no_transformers(store: Store) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.model import open_model\n"
        "opened = open_model('tiny', Path(sys.argv[1]))\n"
        "print('mlx.core' in sys.modules, 'numpy' in sys.modules)\n"
        "from runner.model.load import load; load(opened)\n"
        "print(*(name in sys.modules for name in ('transformers', 'huggingface_hub', 'numpy', 'mlx_lm.utils')))"
    )
    assert python(code, str(store.models_dir)).splitlines() == ["False False", "False False False False"]


def test_opening_takes_a_moment(deep: Store) -> None:
    """Every header is read and checked: 0.1 ms each, here with much room for a busy machine."""
    started = time.process_time()
    open_model("deep", deep.models_dir)
    assert time.process_time() - started < 0.3
