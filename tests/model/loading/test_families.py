"""The module of each architecture, and the names of its tensors. Headers only, no arrays."""

from pathlib import Path

import pytest

from runner.errors import ModelError
from runner.model.architectures import ENCODERS, FAMILIES, OLLAMA_ONLY, Config, Family, family_of, select_tensors
from runner.model.module_config import context_length, module_config
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.sources.safetensors import HeaderEntry
from scripts.tools.models.architectures import architectures

GENERAL = Family("qwen2")


def tensors(*names: str) -> dict[str, LogicalTensor]:
    return {name: LogicalTensor(name, HeaderEntry(Path("blob"), name, "F32", (64, 64))) for name in names}


def chosen(family: Family, name: str) -> str | None:
    """Returns the name under which one tensor is read; None if it is not read."""
    return next(iter(select_tensors(family, tensors(name))), None)


@pytest.mark.parametrize("architecture", OLLAMA_ONLY)
@pytest.mark.parametrize("from_store", [True, False])
def test_what_remains_with_ollama_is_refused_by_its_name(architecture: str, from_store: bool) -> None:
    """Whatever module its `model_type` names: a Qwen 3.5 with another head would answer something."""
    assert architecture not in FAMILIES
    for model_type in ("qwen3_5", "unknown"):
        with pytest.raises(ModelError, match=f"^unsupported architecture: {architecture}, which .*only Ollama's own"):
            family_of(architecture, {"model_type": model_type}, from_store=from_store)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_row_has_a_module_of_mlx_lm(architecture: str) -> None:
    wrapped: Config = {"text_config": {}, "llm_config": {}}
    assert {family_of(architecture, config).module for config in ({}, wrapped)} <= {*architectures(), *ENCODERS}
    assert FAMILIES[architecture].is_listed


@pytest.mark.parametrize(
    ("architecture", "source", "name"),
    [
        ("LlamaForCausalLM", "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("Gemma3ForConditionalGeneration", "model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("Gemma3ForConditionalGeneration", "lm_head.weight", "language_model.lm_head.weight"),
        (
            "Gemma4ForConditionalGeneration",
            "model.language_model.layers.1.moe.switch_mlp.gate_up_proj.weight",
            "language_model.model.layers.1.experts.gate_up_proj",
        ),
        (
            "Gemma4ForConditionalGeneration",
            "model.language_model.layers.1.moe.down_proj",
            "language_model.model.layers.1.experts.down_proj",
        ),
        ("Qwen3_5ForConditionalGeneration", "lm_head.weight", "language_model.lm_head.weight"),
        ("Qwen3NextForConditionalGeneration", "model.language_model.norm.weight", "model.norm.weight"),
        ("NemotronH_Nano_VL_V2", "language_model.backbone.norm_f.weight", "backbone.norm_f.weight"),
        ("NemotronH_Nano_VL_V2", "model.language_model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_the_names_of_a_source_become_those_of_the_module(architecture: str, source: str, name: str) -> None:
    family = family_of(architecture, {"text_config": {}, "llm_config": {}})
    assert chosen(family, source) == name
    assert chosen(family, name) == name, "mlx-lm's own names stay"


def test_a_config_without_a_text_config_is_that_of_the_text_model_alone() -> None:
    flat = family_of("Gemma4ForConditionalGeneration", {})
    assert (flat.module, flat.text, flat.head) == ("gemma4_text", "", "lm_head.weight")
    assert chosen(flat, "lm_head.weight") == "lm_head.weight"
    assert family_of("Gemma4ForCausalLM", {"text_config": {}}).module == "gemma4"
    assert family_of("Qwen3_5MoeForCausalLM", {})[:2] == ("qwen3_5_moe", "")
    assert family_of("NemotronHForCausalLM", {"llm_config": {}}).text == ""


@pytest.mark.parametrize(
    "name",
    [
        *("vision_tower.blocks.0.weight", "visual.merger.weight", "vision_model.x.weight", "mlp1.0.weight"),
        *("sound_encoder.x.weight", "model.audio_tower.x.weight", "model.embed_vision.x.weight", "vision.x.weight"),
        *("multi_modal_projector.x.weight", "model.vision_projection.x.weight", "patch_merge_mlp.x.weight"),
        *("aligner.x.weight", "language_model.visual.x.weight", "model.mtp_block.0.x.weight"),
        *("mtp.layers.0.norm.weight", "language_model.mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_what_no_text_model_needs_is_not_chosen(name: str) -> None:
    assert chosen(GENERAL, name) is chosen(FAMILIES["NemotronH_Nano_VL_V2"], name) is None


@pytest.mark.parametrize("field", ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"])
def test_the_context_has_many_names(field: str) -> None:
    assert context_length({field: 2048}, GENERAL) == 2048
    assert context_length({field: 2048, "text_config": {}}, GENERAL._replace(text="text_config")) == 2048
    assert context_length({field: -1}, GENERAL) == 0


def test_phi3small_writes_to_logits_that_a_small_vocabulary_lacks() -> None:
    """mlx-lm's module masks some tokens by id; with a vocabulary below 100,352 it would write out of bounds."""
    family = Family("phi3small")
    with pytest.raises(ModelError, match="phi3small needs a vocab_size of 100352, found 64"):
        module_config({"vocab_size": 64}, family, {})
    assert module_config({"vocab_size": 100352}, family, {})["vocab_size"] == 100352


def test_qwen3_5_takes_rotary_fields_from_the_top_of_its_text_config() -> None:
    """mlx-lm would take a theta of 100000."""
    family = FAMILIES["Qwen3_5ForConditionalGeneration"]
    text: Config = {**dict.fromkeys(family.required, 4), "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    mended = module_config({"text_config": text}, family, tensors(*(f"model.layers.{i}.x.weight" for i in range(4))))
    assert isinstance(mended["text_config"], dict)
    assert mended["text_config"]["rope_parameters"] == {
        "type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    }  # fmt: skip


def test_a_width_of_heads_that_the_module_does_not_use_is_not_checked() -> None:
    """GLM-4.7-Flash: 2048 values, 20 heads, multi-head latent attention."""
    family = FAMILIES["Glm4MoeLiteForCausalLM"]
    text: Config = {**dict.fromkeys(family.required, 1), "hidden_size": 2048, "num_attention_heads": 20}
    assert module_config(text, family, tensors("model.layers.0.x.weight"))["hidden_size"] == 2048


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_layer", "n_layers", "num_layers"])
def test_more_layers_than_tensors_are_refused_before_any_is_built(field: str) -> None:
    """A module with 10**12 layers would allocate its memory in C++, which ends the process."""
    with pytest.raises(ModelError, match=f"{field} is {10**12}, the model holds 1: layer 1 is missing"):
        module_config({field: 10**12}, GENERAL, tensors("model.layers.0.x.weight"))
    assert module_config({field: 2}, GENERAL, tensors("h.0.a.weight", "h.1.a.weight"))[field] == 2


@pytest.mark.parametrize(("family", "wanted"), [(GENERAL, -1), (FAMILIES["LlamaForCausalLM"], 0)])
def test_a_model_without_layers_is_refused(family: Family, wanted: int) -> None:
    text: Config = {**dict.fromkeys(family.required, 4), "num_hidden_layers": wanted}
    with pytest.raises(ModelError, match=f"invalid num_hidden_layers: {wanted}"):
        module_config(text, family, tensors("model.layers.0.x.weight"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, True, "1e-5"])
def test_a_number_must_be_one(value: object) -> None:
    family = FAMILIES["LlamaForCausalLM"]
    text: Config = {**dict.fromkeys(family.required, 1), "rms_norm_eps": value}
    with pytest.raises(ModelError, match="invalid rms_norm_eps"):
        module_config(text, family, tensors("model.layers.0.x.weight"))


@pytest.mark.parametrize(
    ("top", "text", "names", "tied"),
    [
        (True, None, ["lm_head.weight"], True),
        (False, None, [], False),
        (None, None, ["lm_head.weight"], False),
        (None, None, [], None),
        (False, True, [], True),
    ],
)
def test_what_the_top_of_a_config_says_of_tying_counts_for_its_text(
    top: bool | None, text: bool | None, names: list[str], tied: bool | None
) -> None:
    """transformers writes the flag beside `text_config`; mlx-lm looks inside."""
    family = Family("qwen3_vl", text="text_config")
    config: Config = {"text_config": {} if text is None else {"tie_word_embeddings": text}}
    if top is not None:
        config["tie_word_embeddings"] = top
    mended = module_config(config, family, tensors(*names))
    assert isinstance(mended["text_config"], dict)
    assert mended["text_config"].get("tie_word_embeddings") is tied


@pytest.mark.parametrize("scaling", [{"rope_type": "longrope"}, {"type": "longrope"}])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_the_type_of_a_rope_has_both_its_names(scaling: Config, place: str) -> None:
    mended = module_config({place: {**scaling, "factor": 2.0}}, Family("phi3"), {})
    assert mended["rope_scaling"] == {"type": "longrope", "rope_type": "longrope", "factor": 2.0}


def test_a_directory_goes_by_its_model_type_where_that_is_a_module_of_its_own() -> None:
    """mlx-lm does; Ollama goes by the architecture."""
    config: Config = {"model_type": "nanbeige"}
    assert family_of("LlamaForCausalLM", config).module == "llama"
    assert family_of("LlamaForCausalLM", config, from_store=False).module == "nanbeige"
    for model_type in ("llama", "mistral", "unknown", "../x", None):
        assert family_of("LlamaForCausalLM", {"model_type": model_type}, from_store=False).is_listed
    for model_type in ("gemma4", "gemma4_text", "gemma4_unified"):
        assert family_of("Gemma4ForCausalLM", {"model_type": model_type}, from_store=False).is_listed


def test_a_module_that_would_build_its_vision_tower_does_not() -> None:
    assert "vision_config" not in module_config({"vision_config": {}}, Family("muse_spark"), {})
