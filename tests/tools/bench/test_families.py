"""The pure parts of `scripts/bench families`: sizes, figures, and files for llama.cpp."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from scripts.tools.bench import families, family_models, gguf
from scripts.tools.bench.family_models import VOCABULARY, Parameters, count, make
from scripts.tools.bench.servers import OURS
from scripts.tools.models.architectures import make_module
from scripts.tools.real.convert import convert


@pytest.mark.parametrize(("family", "is_tied"), [("lfm2", True), ("qwen3_moe", False)])
def test_a_token_multiplies_by_its_experts_and_by_one_head(family: str, is_tied: bool) -> None:
    model = make_module(family)
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    total = sum(array.size for _, array in arrays)
    looked_up = sum(array.size for path, array in arrays if "embed_tokens" in path)
    of_others = sum(array.size - array[0].size for path, array in arrays if "switch_mlp" in path)
    assert count(model, chosen=1) == (total, total - of_others - (0 if is_tied else looked_up))


def test_time_is_told_per_active_parameter_and_beside_the_same_weights() -> None:
    ours, theirs, twice = (dict.fromkeys(families.CASES, ms) for ms in (10.0, 20.0, 40.0))
    found = {"llama": [ours], "llama, llama.cpp": [theirs], "mamba2": [theirs], "mamba2, llama.cpp": [twice]}
    report = families.report(1, found, {"llama": Parameters(100, 100), "mamba2": Parameters(900, 50)})
    values = {target.what: (target.value, target.bound, target.met) for target in report.targets}
    assert values == {
        "mamba2, prompt, time per active parameter over the llama's": (4.0, 1.5, False),
        "mamba2, turn, time per active parameter over the llama's": (4.0, 1.5, False),
        "mamba2, 1 streams, time per active parameter over the llama's": (4.0, 1.4, False),
        "llama, prompt, time over llama.cpp's": (0.5, 0.5, True),
        "llama, 1 streams, time over llama.cpp's": (0.5, 1.0, True),
        "mamba2, prompt, time over llama.cpp's": (0.5, 0.5, True),
        "mamba2, 1 streams, time over llama.cpp's": (0.5, 1.0, True),
    }
    speeds = next(row for row in report.tables[0].rows if row[0] == families.name_of("mamba2", OURS))
    assert speeds[-3:] == ["50"] * 3


def test_a_gguf_file_holds_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for field, few in {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3}.items():
        monkeypatch.setitem(family_models.SHARED, field, few)
    made, back = tmp_path / "made", tmp_path / "back"
    made.mkdir()
    back.mkdir()
    make("llama", 1, made)
    gguf.write("llama", made, tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", back, packed=True)
    ours, theirs = (_weights(directory, group) for directory, group in ((made, 64), (back, 32)))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert mx.allclose(weight, theirs[name], rtol=1e-3), name
    is_drawn = mx.any(ours["model.embed_tokens"], 1).tolist()
    assert is_drawn == [*[False] * 256, *[True] * (VOCABULARY - 257), False], "words alone"


def _weights(directory: Path, group: int) -> dict[str, mx.array]:
    weights = cast("dict[str, mx.array]", mx.load(str(directory / "model.safetensors")))
    found = {}
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and f"{module}.scales" in weights:
            array = mx.dequantize(array, weights[f"{module}.scales"], weights[f"{module}.biases"], group, 4)
        if kind == "weight":
            found[module] = array.astype(mx.float32)
    return found
