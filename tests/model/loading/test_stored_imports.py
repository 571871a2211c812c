"""Checkpoints imported in packed form compute by their content, regardless of config and metadata.

See docs/internals/store.md, 2.4, 2.5.
"""

from pathlib import Path

import pytest

from scripts.tools.models.checkpoints import COMMON
from scripts.tools.models.layouts import LAYOUTS
from scripts.tools.models.oracle import oracle
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import Config
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import PACKINGS, Packing, Quantization, parse_metadata
from tests.lib.kernels import mlx_own
from tests.lib.packed_sources import factor_of, write_converted, write_nvidia
from tests.model.loading.conftest import run, run_path, same
from tests.model.loading.test_sources import assert_loads_as_mlx_lm_loads_it, exported, louder

# What mlx-lm's converter wrote.

AFFINE = [Packing((32, 64, 128)[bits % 3], bits, "affine") for bits in (2, 3, 4, 5, 6, 8)]

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


@pytest.mark.parametrize("packing", AFFINE, ids=str)
def test_every_affine_packing_is_recognized(packing: Packing, tmp_path: Path) -> None:
    """By shapes: metadata have only 4 and 8 bits, and are missing for conversions without a mode."""
    place = AFFINE.index(packing)
    family = list(WIDE)[place // 2 % 2]
    converted = write_converted(tmp_path / "mlx", WIDE[family], packing, says_mode=place % 2 == 1)
    assert_loads_as_mlx_lm_loads_it(converted, tmp_path)


@pytest.mark.parametrize(("family", "kind"), [("dense", "nvfp4"), ("experts", "mxfp4"), ("dense", "mxfp8")])
def test_every_floating_packing_is_recognized(family: str, kind: Quantization, tmp_path: Path) -> None:
    assert_loads_as_mlx_lm_loads_it(write_converted(tmp_path / "mlx", WIDE[family], PACKINGS[kind]), tmp_path)


@pytest.mark.parametrize(("family", "says_mode"), [("dense", False), ("experts", True)])
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
    mixed = "model.layers.0.self_attn.v_proj.weight"
    assert store.tensors(mixed)[f"{mixed}.scale"].shape[-1] == 1, "128 weights share a scale, not 64"
    metadata = parse_metadata(store.blob_of(mixed).read_bytes())
    assert metadata == ({"quant_type": "int4", "group_size": "64"} if says_mode else {})


# nvfp4 with a factor for the whole tensor.


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
    with mlx_own():  # our kernels add up experts without factors in one operation, with other roundings
        assert same(run_path("m", tmp_path / "models"), run(wanted))
