"""The old form of a `config.json` and the form that transformers writes now mean the same, for every architecture.

Classes of transformers read and write both; those of mlx-lm say what they mean.
"""

import contextlib
import copy
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from runner.errors import ModelError
from runner.model.architectures import Config, Family
from runner.model.module_config import module_config, without_nulls
from runner.model.renamed import ROWS, rename_fields

if TYPE_CHECKING:
    from scripts.tools.models.renamed import Pair

FEW = ("qwen3_moe", "gpt_neox", "cohere2", "gemma3", "gemma4", "llama", "qwen3_5", "step3p5")
"""Modules that have, together, a renamed field of each kind."""
LEAST: Mapping[str, Config] = {"lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16}}
"""A module -> fields for which transformers' class has no usable default."""


def read(pair: "Pair", part: Config, absent: Config) -> Config:
    """Returns the fields of mlx-lm's class, with those of `absent` for fields that a file lacks."""
    mended = {**json.loads(json.dumps(part)), "model_type": pair.model_type}
    rename_fields(mended, pair.module)
    found: Config = vars(pair.args.from_dict({**absent, **mended}))
    return found


def check_both_ways(pair: "Pair") -> None:
    """An old config means the same after transformers has rewritten it; transformers' own config means its defaults."""
    from scripts.tools.models.renamed import UNMAPPED, is_required, same  # slow: it brings transformers

    unmapped = {field for module, field in UNMAPPED if module == pair.module}
    old = pair.old()
    absent: Config = {name: None for name, field in pair.fields.items() if is_required(field) and name not in old}
    before, after = read(pair, old, absent), read(pair, pair.saved(old), absent)
    compared = (old.keys() & pair.fields.keys()) - unmapped
    assert not {name: (before[name], after[name]) for name in compared if not same(before[name], after[name])}

    theirs = pair.theirs.from_dict(dict(LEAST.get(pair.module, {})))
    theirs.allow_global_per_layer_attribute_access = True
    whole: Config = json.loads(json.dumps(theirs.to_dict()))
    said: Config = {name: getattr(theirs, name, None) for name in pair.fields}
    said |= {name: whole[name] for name, value in said.items() if hasattr(value, "to_dict")}
    new = read(pair, whole, {"tie_word_embeddings": False, **dict.fromkeys(unmapped, 1)})
    others = {row.field for row in ROWS if row.wins and not pair.models.isdisjoint(row.models.split())}
    compared = {name for name, value in said.items() if value is not None and not name.startswith("rope_")}
    compared -= others | unmapped
    assert not {name: (said[name], new[name]) for name in compared if not same(said[name], new[name])}


@pytest.mark.parametrize("module", FEW)
def test_an_old_config_and_a_new_one_mean_the_same(module: str) -> None:
    from scripts.tools.models.renamed import pairs_of

    for pair in pairs_of(module):
        check_both_ways(pair)


@pytest.mark.full
def test_both_forms_mean_the_same_for_every_architecture_and_the_table_is_current(subtests: pytest.Subtests) -> None:
    from scripts.tools.models import renamed as tool

    pairs = tool.pairs()
    assert len(pairs) > 90
    for pair in pairs:
        with subtests.test(f"{pair.module} {pair.model_type}"):
            check_both_ways(pair)
    assert tool.find_rows() == ROWS


MIXED = {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["full_attention", "sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("module", "part", "older"),
    [
        ("exaone_moe", MIXED, {"is_moe_layer": [False, True, True]}),
        ("glm4_moe_lite", MIXED, {"first_k_dense_replace": 1}),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]},
            {"layer_types": ["mamba", "attention"]}),
        ("exaone4", MIXED, {"sliding_window_pattern": "GLGL"}),
        ("exaone4", {"layer_types": ["full_attention"] * 2}, {"sliding_window_pattern": None}),
        ("kimi_linear", {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4,
            "linear_head_dim": 8, "linear_conv_kernel_dim": 3},
            {"linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 3,
            "kda_layers": [1], "full_attn_layers": [2]}}),
        ("minimax_m2", {"head_dim": 128, "rope_parameters": {"partial_rotary_factor": 0.5}}, {"rotary_dim": 64}),
        ("minimax_m2", {"head_dim": 128, "rope_parameters": {}}, {"rotary_dim": 128}),
        ("qwen3_moe", {"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16}),
        ("qwen3_5", {"rope_theta": 5.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5.0}}),
        ("mimo_v2_flash", {**MIXED, "sliding_window": 129, "head_dim": 192, "v_head_dim": 128,
            "num_attention_heads": 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_parameters": {
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334}}},
            {"hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1], "sliding_window_size": 128,
            "swa_head_dim": 192, "swa_v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
            "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5,
            "n_shared_experts": None, "add_swa_attention_sink_bias": True, "topk_method": "noaux_tc"}),
    ],
)  # fmt: skip
def test_what_only_a_new_config_says_becomes_the_older_field(module: str, part: Config, older: Config) -> None:
    read_as = copy.deepcopy(part)
    rename_fields(read_as, module)
    assert {field: read_as[field] for field in older} == older


def test_a_field_that_a_file_lacks_is_what_transformers_takes_for_it() -> None:
    """mlx-lm's classes often have the value of one published model for a default."""
    for module, part, wanted in (
        ("granitemoehybrid", {}, {"position_embedding_type": "nope", "time_step_limit": [0.0, math.inf]}),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, {"position_embedding_type": "rope"}),
        ("qwen2", {}, {"rope_theta": 10000.0}),
        ("qwen2", {"rope_parameters": {"rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 0.25}}, {"partial_rotary_factor": 0.25}),
        ("deepseek_v3", {"n_group": 1}, {"n_group": 1, "topk_group": 4, "routed_scaling_factor": 2.5}),
        ("qwen3", {}, {"rope_theta": None}),  # Ollama's default counts
    ):
        read_as: Config = {"model_type": module, **copy.deepcopy(part)}
        rename_fields(read_as, module)
        assert {field: read_as.get(field) for field in wanted} == wanted
    other: Config = {"model_type": "kimi_k2"}  # of that module, by a class that transformers does not have
    rename_fields(other, "deepseek_v3")
    assert other == {"model_type": "kimi_k2"}


def test_a_text_config_without_a_type_is_that_of_its_module() -> None:
    for text in ({}, {"model_type": "qwen3_vl_moe_text"}, {"model_type": "nobody's"}):
        part: Config = {**text, "num_local_experts": 4}
        rename_fields(part, "qwen3_vl_moe")
        assert part["num_experts"] == 4
    other: Config = {"num_local_experts": 4}
    rename_fields(other, "mixtral")
    assert "num_experts" not in other


def test_a_list_of_layers_counts_more_than_an_interval_beside_it() -> None:
    """transformers uses the list. Of two names of one field, the older counts, as in mlx-lm."""
    linear, full = "linear_attention", "full_attention"
    part: Config = {"full_attention_interval": 4, "layer_types": [linear, full] * 2, "rope_theta": 5.0}
    rename_fields(part | {"rope_parameters": {"rope_theta": 7.0}}, "qwen3_next")
    rename_fields(part, "qwen3_next")
    assert part["full_attention_interval"] == 2
    assert part["rope_theta"] == 5.0


def test_a_model_that_has_no_window_says_so_by_nulls() -> None:
    """EXAONE 4 of 1.2 B. Its module requires the field."""
    config: Config = {"model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": None}
    assert without_nulls(config) == module_config(config, Family("exaone4"), {}) == config
    assert module_config(config, Family("llama"), {}) == {"model_type": "exaone4"}


@pytest.mark.parametrize(
    ("module", "part", "message"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2},
            "layer_types must have full attention at a fixed period, found"),
        ("cohere2", {"layer_types": ["sliding_attention"] * 4000}, "layer_types must have full attention at a fixed"),
        ("cohere2", {"layer_types": "full_attention"}, "layer_types must be a list of kinds of layers, found 'full"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2000}, "mlp_layer_types must have dense first"),
        ("mamba2", {"hidden_size": 64, "expand": "two"}, "expand must be a number, found 'two' with 64"),
        ("glm4_moe", {"hidden_size": 64, "num_attention_heads": 0}, "must be numbers, found 64 and 0"),
    ],
)  # fmt: skip
def test_what_no_older_field_can_say_is_refused(module: str, part: Config, message: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: .*{message}") as refused:
        rename_fields(part, module)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("odd", [7, "text", [], [None], [["full_attention"]], {}, {"full_attention": 7}, True])
def test_what_makes_no_sense_is_refused_or_passed_over(odd: object) -> None:
    """No other error is raised: anybody may have written the file."""
    paths = {row.path.partition(".")[0] for row in ROWS}
    for model in {model for row in ROWS for model in row.models.split()} - {"*"}:
        for path in paths:
            nested: Config = {path: {"full_attention": odd, "rope_theta": odd}}
            for part in ({path: odd}, dict.fromkeys(paths, odd), nested):
                with contextlib.suppress(ModelError):
                    rename_fields(copy.deepcopy(part), model)
