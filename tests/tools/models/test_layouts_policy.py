"""The types that Ollama chooses, so that the stores of the tests are mixed as real ones are.

See docs/internals/store.md, 5.
"""

import pytest

from scripts.tools.models.layouts import HEAD, LAYOUTS
from scripts.tools.models.layouts_policy import Question, type_of
from scripts.tools.models.tensors import Quantization

LAYER = "model.layers.3"
"""Of 16: neither among the first, the last nor every third."""
LAST = "model.layers.15"

CASES = [
    # Everyone's.
    ("Llama", f"{LAYER}.self_attn.q_proj.weight", "int4", "int4"),
    ("Llama", f"{LAYER}.self_attn.v_proj.weight", "int4", "int8"),
    ("Llama", f"{LAYER}.mlp.down_proj.weight", "nvfp4", "mxfp8"),
    ("Llama", "lm_head.weight", "int4", "int8"),
    ("Llama", "lm_head.weight", "mxfp4", "mxfp8"),
    ("Llama", "model.embed_tokens.weight", "int4", None),
    ("Llama", f"{LAYER}.input_layernorm.weight", "int4", None),
    ("Llama", f"{LAYER}.self_attn.q_proj.bias", "int4", None),
    ("Qwen3Moe", f"{LAYER}.mlp.gate.weight", "int8", None),
    ("Qwen3Moe", f"{LAYER}.mlp.experts.down_proj.weight", "int4", "int8"),
    ("Qwen3Moe", f"{LAYER}.mlp.experts.down_proj.weight", "nvfp4", "nvfp4"),
    ("Gemma3", "model.vision_tower.layers.0.q_proj.weight", "int4", None),
    # Families'.
    ("Qwen3_5", f"{LAYER}.linear_attn.in_proj_a.weight", "int8", None),
    ("Qwen3_5", f"{LAYER}.mlp.experts.gate_up_proj", "int4", "int4"),
    ("Gemma4", "model.language_model.embed_tokens.weight", "nvfp4", "mxfp8"),
    ("Gemma4", f"{LAYER}.self_attn.v_proj.weight", "int4", "int4"),
    ("Gemma4", f"{LAST}.self_attn.v_proj.weight", "int4", "int8"),
    ("Gemma4", f"{LAST}.self_attn.k_proj.weight", "int4", "int4"),
    ("MuseGlimmer", f"{LAYER}.self_attn.q_proj.weight", "int4", "int8"),
    ("MuseGlimmer", f"{LAYER}.mlp.down_proj.weight", "int4", "int4"),
    ("NemotronH", "backbone.embeddings.weight", "int4", "int8"),
    ("NemotronH", "backbone.layers.15.mixer.out_proj.weight", "nvfp4", "mxfp8"),
    ("NemotronH", "backbone.layers.3.mixer.out_proj.weight", "nvfp4", "nvfp4"),
    ("Laguna", f"{LAYER}.self_attn.q_proj.weight", "mxfp8", None),
    ("Laguna", f"{LAYER}.self_attn.q_proj.weight", "nvfp4", "nvfp4"),
    ("Laguna", "model.embed_tokens.weight", "nvfp4", "mxfp8"),
    ("Laguna", "model.embed_tokens.weight", "int4", None),
]


def found(family: str, name: str, wanted: Quantization, release: str) -> Quantization | None:
    config = {"architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 16}
    shape = (4, 64, 64) if ".experts." in name else (64, 64)
    return type_of(Question(name, shape, wanted, config, LAYOUTS[release].rules))


@pytest.mark.parametrize(("family", "name", "wanted", "chosen"), CASES)
def test_what_is_packed_how_today(family: str, name: str, wanted: Quantization, chosen: Quantization | None) -> None:
    assert found(family, name, wanted, HEAD.release) == chosen
