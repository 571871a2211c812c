"""Adds fields to a config: fields that mlx-lm's modules read under older names than transformers', and missing fields
for which transformers has another default than mlx-lm.

A file of any age may have old or new names: transformers writes its own names for every model that it saves.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, cast

from runner.errors import ModelError

Config = dict[str, object]
_PER_LAYER = "per_layer_config"
_ROPE = "rope_parameters"
_ROTARY = ("rope_theta", "partial_rotary_factor")
_DIGITS = 10
"""The number of a layer has fewer digits."""


class FieldRow(NamedTuple):
    """A field that mlx-lm's modules read, and the place in transformers' configs from which its value follows."""

    field: str
    path: str
    """The keys that lead to the place, joined by dots. A config without the place stays as it is. An empty path matches
    every config: such a row fills in a missing field for which transformers has another default than mlx-lm."""
    models: str
    """The values of `model_type` to which the row applies, separated by spaces; "*" for all."""
    read: "Callable[[FieldRow, Config], object] | None" = None
    """Computes the field's value; None to copy the value at `path`."""
    about: str = ""
    """An argument of `read`; most functions expect a kind of layers."""
    wins: bool = False
    """True if the value at `path` replaces a field that is present, because transformers computes by the path."""


def rename_fields(part: Config, module: str) -> None:
    """Adds the fields that mlx-lm's `module` reads to `part`: the top level of a config, or its text model's part.

    Raises ModelError if the module has no field that can express a value.
    """
    name = part.get("model_type")
    rows = _BY_MODEL.get(name if isinstance(name, str) else "", ())
    if not rows:  # not a model of transformers, whose defaults do not apply then
        rows = tuple(row for row in _BY_MODEL.get(module, ()) if row.path)
    apply_rows((*_BY_MODEL["*"], *rows), part)
    _check_layers(part, module, rows)


def apply_rows(rows: Iterable[FieldRow], part: Config) -> None:
    """Sets the fields of `rows` in `part`, and `rope_scaling`. Raises ModelError if a row cannot compute its value."""
    for row in rows:
        found = _at(part, row.path)
        if found is not None and (row.wins or part.get(row.field) is None):
            part[row.field] = row.read(row, part) if row.read is not None else found
    _lift_scaling(part)


def layer_overrides(config: Mapping[str, object]) -> dict[int, Config]:
    """Returns layer number -> fields of that layer alone. Raises ModelError if they are malformed.

    transformers writes them as `per_layer_config`, whose keys are layer numbers with leading zeros.
    """
    found, count = config.get(_PER_LAYER) or {}, config.get("num_hidden_layers")
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: {_PER_LAYER} must be an object, found {found!r:.200}")
    overrides: dict[int, Config] = {}
    for number, fields in found.items():
        layer = int(number) if str(number).isdecimal() and len(str(number)) < _DIGITS else -1
        if not isinstance(fields, Mapping) or layer < 0 or (type(count) is int and layer >= count):
            raise ModelError(
                f"config.json: {_PER_LAYER} must map layers to objects, found {number!r:.20}: {fields!r:.100}"
            )
        overrides[layer] = dict(fields)
    return overrides


def _at(part: Config, path: str) -> object:
    found: object = part
    for key in filter(None, path.split(".")):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _check_layers(part: Config, module: str, rows: Iterable[FieldRow]) -> None:
    """Raises ModelError if any layer has a value of its own that neither a row nor `module` reads."""
    if _PER_LAYER not in part:
        return
    kinds = part.get("layer_types")
    read = [row.about.split()[:3:2] for row in rows if row.path == _PER_LAYER and _holds(row, part)]
    for layer, fields in layer_overrides(part).items():
        kind = kinds[layer] if isinstance(kinds, list) and layer < len(kinds) else None
        for field, value in fields.items():
            if value != part.get(field) and [field, kind] not in read and field not in _OF_LAYERS.get(module, ()):
                raise ModelError(
                    f"config.json: {_PER_LAYER}: layer {layer} has {field} {value!r:.80}:"
                    f" {module} has one for all layers"
                )


_OF_LAYERS = {"embedding_gemma2": ("num_attention_heads", "num_key_value_heads", "head_dim")}
"""Module that reads `per_layer_config` itself -> the fields that the module reads there."""


def _kinds(row: FieldRow, part: Config) -> list[object]:
    found = _at(part, row.path)
    if not isinstance(found, list) or not found:
        raise ModelError(f"config.json: {row.path} must be a list of kinds of layers, found {found!r:.200}")
    return found


def every(row: FieldRow, part: Config) -> int:
    """Returns n if exactly every n-th layer is of the kind `about`. Raises ModelError if there is no such n."""
    kinds = _kinds(row, part)
    for period in (part.get(row.field), kinds.index(row.about) + 1 if row.about in kinds else 0):
        found = [type(period) is int and period > 0 and not index % period for index in range(1, len(kinds) + 1)]
        if any(found) and found == [kind == row.about for kind in kinds]:
            return cast("int", period)
    raise ModelError(
        f"config.json: {row.path} must have {row.about.replace('_', ' ')} at a fixed period, found {kinds!r:.200}"
    )


def leading(row: FieldRow, part: Config) -> int:
    """Returns the number of layers of the kind `about`. Raises ModelError unless they all come first."""
    kinds = _kinds(row, part)
    count = kinds.count(row.about)
    if row.about in kinds[count:]:
        raise ModelError(f"config.json: {row.path} must have {row.about} first, found {kinds!r:.200}")
    return count


def marks(row: FieldRow, part: Config) -> list[int]:
    """Returns a list with 1 for each layer of the kind `about`, and 0 for each other layer."""
    return [int(kind == row.about) for kind in _kinds(row, part)]


def numbers(row: FieldRow, part: Config) -> str:
    """Returns the numbers of the layers of the kind `about`, separated by commas."""
    return ",".join(str(index) for index, kind in enumerate(_kinds(row, part)) if kind == row.about)


def spelt(row: FieldRow, part: Config) -> list[object]:
    """Returns the kinds of the layers in mlx-lm's words. `about` has pairs `TRANSFORMERS_WORD=MLX_LM_WORD`."""
    words = dict(word.split("=") for word in row.about.split())
    return [words.get(kind, kind) if isinstance(kind, str) else kind for kind in _kinds(row, part)]


def letters(row: FieldRow, part: Config) -> str | None:
    """Returns one letter for each layer, joined to a text; None if all layers are of the same kind. `about` has pairs
    `KIND=LETTER`."""
    return "".join(map(str, spelt(row, part))) if len(set(map(str, _kinds(row, part)))) > 1 else None


def constant(row: FieldRow, part: Config) -> object:  # noqa: ARG001
    """Returns the value `about`, in JSON: a constant or a default of transformers."""
    return json.loads(row.about)


def times(row: FieldRow, part: Config) -> int:
    """Returns the number at `path` times a factor. `about` begins with the factor, or with the name of a field that has
    the factor; each further word of `about` is a number to add to the product."""
    found, (factor, *more) = _at(part, row.path), row.about.split()
    by = part.get(factor, factor)
    try:
        return round(cast("float", found) * float(cast("str", by)) + sum(map(int, more)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"config.json: {row.path} must be a number, found {found!r:.80} with {by!r:.80}") from error


def divided(row: FieldRow, part: Config) -> int:
    """Returns the number at `path` divided by the field that `about` names."""
    found, by = _at(part, row.path), part.get(row.about)
    if type(found) is not int or type(by) is not int or by <= 0:
        raise ModelError(f"config.json: {row.path} and {row.about} must be numbers, found {found!r:.80} and {by!r:.80}")
    return found // by


def of_kind(row: FieldRow, part: Config) -> object:
    """Returns the value that a field has in all layers of a kind; None without such layers. `about` is `FIELD of KIND`
    or `FIELD of KIND if FLAG`; if the flag is not set, returns the row's field unchanged."""
    field, _, kind, *_ = row.about.split()
    if not _holds(row, part):
        return part.get(row.field)
    overrides = layer_overrides(part)
    layers = enumerate(_kinds(row._replace(path="layer_types"), part))
    values = [overrides.get(layer, {}).get(field, part.get(field)) for layer, each in layers if each == kind]
    if any(value != values[0] for value in values):
        raise ModelError(
            f"config.json: {_PER_LAYER}: the layers of {kind} must share one {field}, found {values!r:.200}"
        )
    return values[0] if values else None


def _holds(row: FieldRow, part: Config) -> bool:
    """Returns True unless `about` ends with ` if FLAG` and the flag is not set."""
    _, *flag = row.about.split(" if ")
    return not flag or part.get(*flag) is True


def other_heads(row: FieldRow, part: Config) -> Config:
    """Returns the numbers of heads in the layers of a kind, in the form of Step 3.5. `about` is as in `of_kind`."""
    groups = part.get("num_attention_groups", part.get("num_key_value_heads"))
    return {"num_attention_heads": of_kind(row, part), "num_attention_groups": groups}


def delta_layers(row: FieldRow, part: Config) -> Config:
    """Returns the `linear_attn_config` of a Kimi Linear, in which the first layer has the number 1."""
    sizes = {"head_dim": "head_dim", "num_heads": "num_heads", "short_conv_kernel_size": "conv_kernel_dim"}
    kinds = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
    return {key: part.get(f"linear_{name}") for key, name in sizes.items()} | {
        key: [index for index, each in enumerate(_kinds(row, part), 1) if each == kind] for key, kind in kinds.items()
    }


def each(row: FieldRow, part: Config) -> list[object]:
    """Returns a list with one value for each layer: the field `about` of the rotation for the layer's kind."""
    kinds = _kinds(row._replace(path="layer_types"), part)
    return [_at(part, f"{_ROPE}.{kind}.{row.about}") for kind in kinds]


def scaled(row: FieldRow, part: Config) -> list[str]:
    """Returns the kinds of layers whose rotation is scaled."""
    ropes = _at(part, row.path)
    kinds = ropes.items() if isinstance(ropes, dict) else ()
    return [kind for kind, rope in kinds if isinstance(rope, dict) and _rope_type(rope) != "default"]


def flat(row: FieldRow, part: Config) -> Config:
    """Returns `rope_parameters`, made from the fields in `about`, which older files have at the top of the config."""
    scaling = part.get("rope_scaling")
    rope = scaling if isinstance(scaling, dict) else {"type": "default"}
    return rope | {key: part[key] for key in row.about.split() if key in part}


def _rope_type(rope: Config) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _lift_scaling(part: Config) -> None:
    """Copies the rotation's scaling to `rope_scaling`, with the type under both its names, `type` and `rope_type`."""
    rope = part.get(_ROPE)
    if isinstance(rope, dict):
        full = rope.get("full_attention")
        rope = full if isinstance(full, dict) else rope
        if _rope_type(rope) != "default" and part.get("rope_scaling") is None:
            part["rope_scaling"] = {key: value for key, value in rope.items() if key not in _ROTARY}
    scaling = part.get("rope_scaling")
    kind = scaling.get("type", scaling.get("rope_type")) if isinstance(scaling, dict) else None
    if isinstance(scaling, dict) and kind is not None:
        part["rope_scaling"] = {"type": kind, "rope_type": kind, **scaling}


# `python -m scripts.tools.models.renamed` makes this table from the installed transformers; a test checks it.
# begin
ROWS: tuple[FieldRow, ...] = (
    FieldRow("rope_theta", "rope_parameters.rope_theta", "*"),
    FieldRow("rope_theta", "rope_parameters.full_attention.rope_theta", "*"),
    FieldRow("rope_local_base_freq", "rope_parameters.sliding_attention.rope_theta", "*"),
    FieldRow("partial_rotary_factor", "rope_parameters.partial_rotary_factor", "*"),
    FieldRow("add_full_attention_sink_bias", "layer_types", "mimo_v2_flash", constant, "false"),
    FieldRow("add_swa_attention_sink_bias", "layer_types", "mimo_v2_flash", constant, "true"),
    FieldRow("attention_method", "zero_expert_num", "longcat_flash", constant, '"MLA"'),
    FieldRow("attention_other_setting", "per_layer_config", "step3p5", other_heads,
        "num_attention_heads of sliding_attention"),
    FieldRow("block_dim", "hidden_size", "lfm2 lfm2-vl"),
    FieldRow("first_k_dense_replace", "mlp_layer_types", "glm4_moe_lite kimi_linear", leading, "dense"),
    FieldRow("first_k_dense_replace", "n_routed_experts", "solar_open", constant, "0"),
    FieldRow("full_attention_interval", "layer_types", "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next",
        every, "full_attention", wins=True),
    FieldRow("global_head_dim", "per_layer_config", "gemma4 gemma4_text gemma4_unified_text", of_kind,
        "head_dim of full_attention", wins=True),
    FieldRow("head_dim", "linear_head_dim", "bailing_hybrid bailing_moe_v3", wins=True),
    FieldRow("head_dim", "hidden_size", "exaone4 exaone_moe glm4_moe qwen3_moe", divided, "num_attention_heads"),
    FieldRow("hybrid_layer_pattern", "layer_types", "mimo_v2_flash", marks, "sliding_attention"),
    FieldRow("intermediate_size", "expand", "mamba2", times, "hidden_size"),
    FieldRow("intermediate_size", "moe_intermediate_size", "solar_open"),
    FieldRow("is_moe_layer", "mlp_layer_types", "exaone_moe", marks, "sparse"),
    FieldRow("layer_norm_epsilon", "rms_norm_eps", "exaone"),
    FieldRow("layer_types", "layer_types", "granitemoehybrid", spelt,
        "linear_attention=mamba full_attention=attention", wins=True),
    FieldRow("layernorm_epsilon", "rms_norm_eps", "mimo_v2_flash"),
    FieldRow("linear_attn_config", "layer_types", "kimi_linear", delta_layers),
    FieldRow("max_position_embeddings", "model_max_length", "bailing_hybrid bailing_moe_v3"),
    FieldRow("mla_scale_kv_lora", "zero_expert_num", "longcat_flash", constant, "true"),
    FieldRow("mla_scale_q_lora", "zero_expert_num", "longcat_flash", constant, "true"),
    FieldRow("mlp_bias", "hidden_act", "apertus", constant, "false"),
    FieldRow("moe_layer_freq", "index_topk", "glm_moe_dsa", constant, "1"),
    FieldRow("moe_layer_freq", "mlp_layer_types", "mimo_v2_flash", marks, "sparse"),
    FieldRow("moe_layers_enum", "mlp_layer_types", "step3p5", numbers, "sparse"),
    FieldRow("moe_num_experts", "n_routed_experts", "step3p5"),
    FieldRow("moe_top_k", "num_experts_per_tok", "step3p5"),
    FieldRow("n_ctx", "n_positions", "gpt2"),
    FieldRow("n_group", "num_expert_group", "bailing_hybrid bailing_moe_v3"),
    FieldRow("n_shared_experts", "layer_types", "mimo_v2_flash", constant, "null"),
    FieldRow("norm_topk_prob", "moe_renormalize", "bailing_hybrid"),
    FieldRow("norm_topk_prob", "num_local_experts", "qwen3_vl_moe qwen3_vl_moe_text", constant, "true"),
    FieldRow("num_attention_groups", "num_key_value_heads", "step3p5"),
    FieldRow("num_experts", "num_local_experts", "kolibri1 mellum qwen3_moe qwen3_vl_moe qwen3_vl_moe_text"),
    FieldRow("num_experts_per_tok", "num_experts_per_token", "bailing_hybrid bailing_moe_v3"),
    FieldRow("num_global_key_value_heads", "per_layer_config", "gemma4 gemma4_text gemma4_unified gemma4_unified_text",
        of_kind, "num_key_value_heads of full_attention if attention_k_eq_v", wins=True),
    FieldRow("num_layers", "num_hidden_layers", "exaone"),
    FieldRow("partial_rotary_factor", "rope_parameters.full_attention.partial_rotary_factor", "mimo_v2_flash"),
    FieldRow("partial_rotary_factor", "n_routed_experts", "solar_open", constant, "1.0"),
    FieldRow("partial_rotary_factors", "rope_parameters.full_attention.partial_rotary_factor", "step3p5", each,
        "partial_rotary_factor"),
    FieldRow("post_norm", "hidden_act", "apertus", constant, "false"),
    FieldRow("qk_norm", "hidden_act", "apertus", constant, "true"),
    FieldRow("rope_parameters", "rope_theta", "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text", flat,
        "rope_theta partial_rotary_factor mrope_section"),
    FieldRow("rope_scaling", "rope_parameters", "exaone4 glm4_moe llama4 llama4_text", constant, "null"),
    FieldRow("rope_theta", "linear_head_dim", "kimi_linear", constant, "10000.0"),
    FieldRow("rope_theta", "rope_parameters.full_attention", "step3p5", each, "rope_theta", wins=True),
    FieldRow("rotary_dim", "head_dim", "minimax_m2"),
    FieldRow("rotary_dim", "rope_parameters.partial_rotary_factor", "minimax_m2", times, "head_dim", wins=True),
    FieldRow("rotary_emb_base", "rope_parameters.rope_theta", "gpt_neox"),
    FieldRow("rotary_pct", "rope_parameters.partial_rotary_factor", "gpt_neox"),
    FieldRow("scoring_func", "n_routed_experts", "dots1", constant, '"sigmoid"'),
    FieldRow("scoring_func", "index_topk", "glm_moe_dsa", constant, '"sigmoid"'),
    FieldRow("scoring_func", "layer_types", "mimo_v2_flash", constant, '"sigmoid"'),
    FieldRow("shared_intermediate_size", "num_local_experts", "minimax_m2", constant, "0"),
    FieldRow("sliding_window_pattern", "layer_types", "cohere2 gemma3 gemma3_text", every, "full_attention", wins=True),
    FieldRow("sliding_window_pattern", "layer_types", "exaone4", letters, "sliding_attention=L full_attention=G",
        wins=True),
    FieldRow("sliding_window_size", "sliding_window", "mimo_v2_flash", times, "1 -1"),
    FieldRow("swa_head_dim", "head_dim", "mimo_v2_flash"),
    FieldRow("swa_num_attention_heads", "num_attention_heads", "mimo_v2_flash"),
    FieldRow("swa_num_key_value_heads", "num_key_value_heads", "mimo_v2_flash", times, "2"),
    FieldRow("swa_rope_theta", "rope_parameters.sliding_attention.rope_theta", "mimo_v2_flash"),
    FieldRow("swa_v_head_dim", "v_head_dim", "mimo_v2_flash"),
    FieldRow("topk_method", "index_topk", "glm_moe_dsa", constant, '"noaux_tc"'),
    FieldRow("topk_method", "layer_types", "mimo_v2_flash", constant, '"noaux_tc"'),
    FieldRow("yarn_only_types", "rope_parameters", "step3p5", scaled),
    FieldRow("zero_expert_type", "zero_expert_num", "longcat_flash", constant, '"identity"'),
    FieldRow("attention_out_multiplier", "", "falcon_h1", constant, "1.0"),
    FieldRow("attention_value_scale", "", "mimo_v2_flash", constant, "0.707"),
    FieldRow("attn_temperature_tuning", "", "llama4_text", constant, "true"),
    FieldRow("embedding_multiplier", "", "falcon_h1", constant, "1.0"),
    FieldRow("key_multiplier", "", "falcon_h1", constant, "1.0"),
    FieldRow("lm_head_multiplier", "", "falcon_h1", constant, "1.0"),
    FieldRow("mamba_norm_before_gate", "", "falcon_h1", constant, "true"),
    FieldRow("moe_k", "", "ernie4_5_moe", constant, "6"),
    FieldRow("moe_router_scaling_factor", "", "step3p5", constant, "1.0"),
    FieldRow("mup_enabled", "", "afmoe", constant, "false"),
    FieldRow("n_group", "", "deepseek_v3 deepseek_v32", constant, "8"),
    FieldRow("num_experts_per_tok", "", "afmoe", constant, "6"),
    FieldRow("num_experts_per_tok", "", "deepseek_v3 deepseek_v32", constant, "8"),
    FieldRow("num_experts_per_tok", "", "granitemoehybrid", constant, "2"),
    FieldRow("partial_rotary_factor", "", "phi", constant, "0.5"),
    FieldRow("position_embedding_type", "", "granitemoehybrid", constant, '"nope"'),
    FieldRow("query_pre_attn_scalar", "", "gemma2", constant, "256"),
    FieldRow("rms_norm_eps", "", "phimoe", constant, "1e-05"),
    FieldRow("rope_interleave", "", "mistral4", constant, "true"),
    FieldRow("rope_theta", "", "bitnet cohere qwen3_vl_text", constant, "500000.0"),
    FieldRow("rope_theta", "", "cohere2 exaone_moe falcon_h1 glm_moe_dsa minicpm3 qwen2 qwen2_moe starcoder2",
        constant, "10000.0"),
    FieldRow("rope_theta", "", "phimoe", constant, "1000000.0"),
    FieldRow("rope_theta", "", "smollm3", constant, "2000000.0"),
    FieldRow("route_scale", "", "afmoe", constant, "1.0"),
    FieldRow("routed_scaling_factor", "", "deepseek_v3 deepseek_v32", constant, "2.5"),
    FieldRow("routed_scaling_factor", "", "kimi_linear", constant, "2.446"),
    FieldRow("ssm_in_multiplier", "", "falcon_h1", constant, "1.0"),
    FieldRow("ssm_out_multiplier", "", "falcon_h1", constant, "1.0"),
    FieldRow("time_step_limit", "", "granitemoehybrid", constant, "[0.0, Infinity]"),
    FieldRow("topk_group", "", "deepseek_v3 deepseek_v32", constant, "4"),
    FieldRow("topk_method", "", "deepseek_v2", constant, '"greedy"'),
)  # fmt: skip
# end

_BY_MODEL: Mapping[str, tuple[FieldRow, ...]] = {
    model: tuple(row for row in ROWS if model in row.models.split())
    for model in {model for row in ROWS for model in row.models.split()}
}
