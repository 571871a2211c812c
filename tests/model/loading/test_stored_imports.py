"""Checkpoints imported in packed form compute by their content, regardless of config and metadata.

See docs/internals/store.md, 2.4, 2.5.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from _pytest.mark import ParameterSet

from runner.model import open_model
from runner.model.weights.load import load
from scripts.tools.models.checkpoints import COMMON, config_of, write_directory
from scripts.tools.models.layouts import LAYOUTS, plan
from scripts.tools.models.oracle import load_directory, oracle
from scripts.tools.models.sources import SOURCES, Published
from scripts.tools.models.sources_form import Config, read_config
from scripts.tools.models.sources_packed import Producer, factor_of, write_converted, write_nvidia
from scripts.tools.models.store import PACKINGS, Quantization, source_tensors, write_store
from scripts.tools.models.tensors import Packing, parse_metadata, rounded
from tests.model.loading.conftest import run, run_path, same
from tests.model.loading.stored import close, put

# What mlx-lm's converter wrote.

CONVERTED = [
    *("llama", "qwen3", "gemma3-text", "gemma3", "gemma4-text", "gemma4-moe", "gemma4_unified", "qwen3.5"),
    *("qwen3.5-moe", "qwen3-next", "glm4-moe-lite", "laguna", "nemotron-h", "muse-glimmer", "deepseek-v3"),
    *("llama4", "qwen3-moe", "mixtral", "gpt-oss", "granite-moe", "falcon-h1", "mamba2", "lfm2", "gpt2"),
]
AFFINE = [Packing(group_size, bits, "affine") for bits in (2, 3, 4, 5, 6, 8) for group_size in (32, 64, 128)]

_WIDE: Config = {**COMMON, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": False}
WIDE: dict[str, Config] = {
    "dense": {**_WIDE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "experts": {
        **_WIDE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""Models whose every row holds groups of 128."""


def assert_loads_as_mlx_lm_loads_it(converted: Path, root: Path) -> None:
    """From the store and from the directory itself."""
    write_store(root / "models", "m", converted)
    wanted = run(load_directory(converted))
    assert same(run_path("m", root / "models"), wanted)
    assert same(run_path(converted), wanted)


def converted_config(name: str) -> Config:
    source = SOURCES[name]
    return {**source.module, "architectures": [source.architecture]}


def conversions() -> Iterator[ParameterSet]:
    for place, name in enumerate(CONVERTED):
        for number, kind in enumerate(("int4", "nvfp4")):
            yield pytest.param(name, kind, marks=() if place % 2 == number else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), list(conversions()))
def test_a_conversion_of_every_family_loads(name: str, kind: Quantization, tmp_path: Path) -> None:
    converted = write_converted(tmp_path / "mlx", converted_config(name), PACKINGS[kind])
    assert_loads_as_mlx_lm_loads_it(converted, tmp_path)


def affine() -> Iterator[ParameterSet]:
    for place, packing in enumerate(AFFINE):
        ways = [(family, says_mode) for family in WIDE for says_mode in (False, True)]
        for number, (family, says_mode) in enumerate(ways):
            fast = number == place % len(ways)
            yield pytest.param(family, packing, says_mode, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("family", "packing", "says_mode"), list(affine()))
def test_every_affine_packing_is_recognized(family: str, packing: Packing, says_mode: bool, tmp_path: Path) -> None:
    """By shapes: metadata have only 4 and 8 bits, and are missing for conversions without a mode."""
    converted = write_converted(tmp_path / "mlx", WIDE[family], packing, says_mode=says_mode)
    assert_loads_as_mlx_lm_loads_it(converted, tmp_path)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("family", WIDE)
def test_every_floating_packing_is_recognized(family: str, kind: Quantization, tmp_path: Path) -> None:
    assert_loads_as_mlx_lm_loads_it(write_converted(tmp_path / "mlx", WIDE[family], PACKINGS[kind]), tmp_path)


@pytest.mark.parametrize("says_mode", [False, True])
@pytest.mark.parametrize("family", WIDE)
def test_a_conversion_of_mixed_precision_loads_against_its_metadata(
    family: str, says_mode: bool, tmp_path: Path
) -> None:
    """Every blob declares the type of the model as a whole."""
    others = {
        "down_proj": Packing(32, 8, "affine"),
        "v_proj": Packing(128, 6, "affine"),
        "k_proj": Packing(64, 3, "affine"),
        "0.self_attn.o_proj": None,
        "embed_tokens": Packing(32, 5, "affine"),
    }
    packing = Packing(64, 4, "affine")
    converted = write_converted(tmp_path / "mlx", WIDE[family], packing, says_mode=says_mode, others=others)
    assert_loads_as_mlx_lm_loads_it(converted, tmp_path)
    store = write_store(tmp_path / "models", "m", converted)
    metadata = parse_metadata(store.blob_of("model.layers.0.self_attn.v_proj.weight").read_bytes())
    assert metadata == ({"quant_type": "int4", "group_size": "64"} if says_mode else {})


# nvfp4 with a factor for the whole tensor.

NVIDIA = ["llama", "qwen3", "gemma3", "nemotron-h", "qwen3.5-moe-separate", "glm4-moe-lite", "laguna", "mixtral"]
PRODUCERS: tuple[Producer, ...] = ("modelopt", "compressed-tensors")


def exports() -> list[ParameterSet]:
    """One producer fast for each family, the other slow."""
    return [
        pytest.param(name, producer, marks=() if place % 2 == number else pytest.mark.slow)
        for place, name in enumerate(NVIDIA)
        for number, producer in enumerate(PRODUCERS)
    ]


def louder(source_dir: Path, directory: Path) -> Path:
    """The model with larger weights: their scales in nvfp4 must not come near the smallest that eight bits can say."""
    weights = mx.load(str(source_dir / "model.safetensors"))
    assert isinstance(weights, dict)
    grown = {name: array * 4 if array.ndim > 1 else array for name, array in weights.items()}
    return write_directory(directory, read_config(source_dir), grown)


def exported(name: str, source_dir: Path) -> dict[str, Packing]:
    """Returns the matrices that NVIDIA's tools pack: those that Ollama would, except the first and the last."""
    found = plan(source_tensors(source_dir), read_config(source_dir), "nvfp4").packings
    ends = ("lm_head.weight", "embed_tokens.weight", "embeddings.weight")
    return {key: PACKINGS["nvfp4"] for key in found if not key.endswith(ends) and key not in SOURCES[name].spare}


@pytest.mark.parametrize(("name", "producer"), exports())
def test_factors_that_are_powers_of_two_change_no_bit(
    name: str, producer: Producer, published: Published, tmp_path: Path
) -> None:
    """A model packed a power of two smaller, with that factor, equals the model packed unchanged."""
    source_dir = louder(published(name), tmp_path / "louder")
    packings = exported(name, source_dir)

    def factor(tensor: str) -> float:
        return factor_of(tensor, powers_of_two=True)

    weights = mx.load(str(source_dir / "model.safetensors"))
    assert isinstance(weights, dict)
    for tensor, packing in packings.items():
        array, number = weights[tensor], factor(tensor)
        assert mx.array_equal(rounded(array / number, packing) * number, rounded(array, packing))
    nvidia = write_nvidia(tmp_path / "nvidia", source_dir, producer, packings.__contains__, factor)
    write_store(tmp_path / "models", "m", nvidia)
    wanted = oracle(tmp_path / "mlx", name, source_dir, packings)
    assert same(run_path("m", tmp_path / "models"), run(wanted))


@pytest.mark.parametrize(("name", "producer"), exports())
def test_any_factor_multiplies_what_was_packed(
    name: str, producer: Producer, published: Published, tmp_path: Path
) -> None:
    """Against the unpacked numbers in a dense model; another order of additions leaves the last digits open.

    A latent projection is unpacked to bfloat16, so that its product with a factor has fewer digits.
    """
    source_dir = published(name)
    packings = exported(name, source_dir)

    def factor(tensor: str) -> float:
        return factor_of(tensor, powers_of_two=False)

    nvidia = write_nvidia(tmp_path / "nvidia", source_dir, producer, packings.__contains__, factor)
    write_store(tmp_path / "models", "m", nvidia)
    weights = mx.load(str(source_dir / "model.safetensors"))
    assert isinstance(weights, dict)
    for tensor, packing in packings.items():
        weights[tensor] = rounded(weights[tensor] / factor(tensor), packing) * factor(tensor)
    dense = write_directory(tmp_path / "dense", read_config(source_dir), weights)
    wanted = run(oracle(tmp_path / "mlx", name, dense))
    assert close(run_path("m", tmp_path / "models"), wanted, 5e-3 if SOURCES[name].dense else 2e-5)


@pytest.mark.parametrize(("name", "release"), [("qwen3-moe", "0.20.8"), ("glm4-moe-lite", "0.30")])
def test_the_stacked_factors_of_older_releases_are_read(
    name: str, release: str, published: Published, tmp_path: Path
) -> None:
    """They stacked the experts of compressed-tensors, and their factors to [E, 1, 1]."""
    source_dir = louder(published(name), tmp_path / "louder")
    packings = exported(name, source_dir)
    nvidia = write_nvidia(
        tmp_path / "nvidia",
        source_dir,
        "compressed-tensors",
        packings.__contains__,
        lambda tensor: factor_of(tensor, powers_of_two=True),
    )
    store = write_store(tmp_path / "models", "m", nvidia, layout=LAYOUTS[release])
    stacks = store.tensors("model.layers.1.mlp.experts")
    assert stacks["model.layers.1.mlp.switch_mlp.up_proj.weight.global_scale"].shape[1:] == (1, 1)
    wanted = oracle(tmp_path / "mlx", name, source_dir, packings)
    assert same(run_path("m", tmp_path / "models"), run(wanted))


# What a config says of the source of an import is of no interest in a store.

STALE: dict[str, Config] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}


@pytest.mark.parametrize("method", STALE)
@pytest.mark.parametrize("name", ["qwen3.5-moe", "deepseek-v3"])
def test_the_packing_of_the_source_says_nothing_of_the_store(
    name: str, method: str, published: Published, tmp_path: Path
) -> None:
    """FP8 sources arrive as mxfp8, their config as it was; so do sources that were packed otherwise."""
    source_dir = published(name)
    shutil.copytree(source_dir, tmp_path / "stale")
    config = read_config(source_dir)
    text = config.get("text_config")
    (text if isinstance(text, dict) else config)["quantization_config"] = STALE[method]
    (tmp_path / "stale" / "config.json").write_text(json.dumps(config))
    stored = put(tmp_path, name, tmp_path / "stale", "mxfp8")
    stored._replace(source_dir=source_dir).assert_computes_what_the_source_does()


def test_an_import_without_metadata_is_summed_up_by_its_bytes(tmp_path: Path) -> None:
    """Only existing tensors are read."""
    converted = write_converted(tmp_path / "mlx", config_of("llama"), PACKINGS["int4"], says_mode=False)
    store = write_store(tmp_path / "models", "m", converted)
    opened = open_model("m", tmp_path / "models")
    assert opened.total_bytes == sum(len(tensor.data) for tensor in source_tensors(converted).values())
    assert load(opened)
    assert not any(
        parse_metadata(store.blob(layer["digest"]).read_bytes())
        for layer in store.layers
        if str(layer["mediaType"]).endswith("tensor")
    )
