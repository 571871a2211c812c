"""Reads and checks `config.json`, and adapts fields that mlx-lm would read differently (docs/internals/store.md, 3)."""

import copy
import math
import re
from collections.abc import Mapping

from runner import json_files
from runner.errors import ModelError
from runner.model.architectures import Config, Family
from runner.model.layer_counts import check_layer_count
from runner.model.renamed import rename_fields
from runner.model.sources.checkpoint import LogicalTensor, ModelCheckpoint

_MEANT: dict[str, frozenset[str]] = {
    "q_lora_rank": frozenset(
        {
            *("bailing_moe_v3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_vl"),
            *("mistral3", "mistral4", "youtu_llm"),
        }
    ),
    "n_routed_experts": frozenset({"glm4_moe", "glm4_moe_lite", "mistral3", "mistral4", "solar_open"}),
    "n_shared_experts": frozenset({"glm4_moe", "glm4_moe_lite", "mistral3", "mistral4", "solar_open"}),
    "num_experts": frozenset({"bailing_hybrid", "bailing_moe", "bailing_moe_linear"}),
    "num_shared_experts": frozenset({"exaone_moe"}),
    "num_key_value_heads": frozenset({"gear", "lfm2", "lfm2-vl", "mixtral", "olmo_hybrid", "phi", "recurrent_gemma"}),
    "head_dim": frozenset({"glm", "helium"}),
    "global_head_dim": frozenset({"gemma4", "gemma4_text"}),
    "hidden_size_per_layer_input": frozenset({"gemma4", "gemma4_text"}),
    "final_logit_softcapping": frozenset({"gemma4", "gemma4_text"}),
    "logits_soft_cap": frozenset({"recurrent_gemma"}),
    "layer_types": frozenset({"gear"}),
    "rope_scaling": frozenset({"exaone4"}),
    "rope_theta": frozenset({"kimi_linear", "olmo_hybrid"}),
    "rotary_dim": frozenset({"gptj"}),
    "sliding_window": frozenset({"exaone4"}),
    "sliding_window_pattern": frozenset({"exaone4"}),
}
"""Field -> the mlx-lm modules for which null is a real value, although the field's default differs. Null then means,
for example: queries without compression, no shared experts, as many key heads as query heads. A test covers all."""


def without_nulls(value: Config) -> Config:
    """Returns `value` without null fields, except fields whose null is a real value for some module."""
    return {key: item for key, item in value.items() if item is not None or key in _MEANT}


def drop_nulls(config: Config, module: str) -> None:
    """Removes null fields from `config`, except fields whose null is a real value for mlx-lm's `module`."""
    for key in [key for key, item in config.items() if item is None and module not in _MEANT.get(key, ())]:
        del config[key]


_STALE = ("quantization", "quantization_config", "compression_config")
"""Fields about packing. In a store they describe the tensors before Ollama converted them, not the stored tensors."""
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_CHECKED_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
_REAL_FIELDS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "routed_scaling_factor")
_CONTEXT_FIELDS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    *("seq_length", "model_max_length"),
)
_PHI3_SMALL_ROWS = 100352
HEAD = re.compile(
    r"(?:(?:model|language_model|transformer)\.)*(?:lm_head|output|embed_out)\.(?:weight|scales|biases|global_scale)"
)
"""Matches the names of the output projection's parameters, in any of mlx-lm's modules."""
EMBEDDINGS = (
    *("embed_tokens.weight", "embeddings.weight", "wte.weight", "word_embeddings.weight"),
    *(".embedding.weight", ".embed_in.weight"),
)
"""Endings of the name of the token embedding's weight."""


def read_config(checkpoint: ModelCheckpoint, *, nulls: bool = False, name: str = "config.json") -> Config:
    """Returns the object in the model's JSON file `name`. Drops null fields, which stand for defaults, unless `nulls`.

    Raises ModelError `failed to read NAME: ...`.
    """
    try:
        config = json_files.parse(checkpoint.required_file(name), hook=None if nulls else _read_object)
    except ModelError as error:
        raise ModelError(f"failed to read {name}: {error}") from error
    except ValueError as error:
        raise ModelError(f"failed to read {name}: {checkpoint.files[name].path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"failed to read {name}: want an object, found {type(config).__name__}")
    return config


def _read_object(value: Config) -> Config | float:
    """Returns an object without nulls, or a number: transformers writes infinity as `{"__float__": "Infinity"}`."""
    tag = value.get("__float__") if len(value) == 1 else None
    return _FLOATS.get(tag, value) if isinstance(tag, str) else without_nulls(value)


def module_config(config: Config, family: Family, tensors: Mapping[str, LogicalTensor]) -> Config:
    """Returns a copy of `config` that mlx-lm's module reads correctly. Raises ModelError for bad fields."""
    mended = copy.deepcopy(config)
    mended["model_type"] = family.module if family.is_listed else config.get("model_type")
    text = text_config(mended, family)
    for part in (mended, text):
        drop_nulls(part, family.module)
        rename_fields(part, family.module)
        if family.is_listed:  # a few unlisted modules read these fields of their own conversion
            for key in _STALE:
                part.pop(key, None)
    _decide_tying(mended, text, family, tensors)
    if family.is_listed:
        for key, value in family.defaults.items():
            text.setdefault(key, value)
        rows = _vocabulary_rows(tensors)
        if rows:
            # The gemma3 module takes the vocabulary's size from the top level, where the default differs.
            mended["vocab_size"] = text.setdefault("vocab_size", rows)
        _check_fields(text, family)
    elif family.module == "phi3small":
        found = text.get("vocab_size", _PHI3_SMALL_ROWS)
        if not isinstance(found, int) or found < _PHI3_SMALL_ROWS:  # the module's forward always writes to these scores
            raise ModelError(f"config.json: phi3small needs a vocab_size of {_PHI3_SMALL_ROWS}, found {found!r}")
    elif family.module == "muse_spark":
        mended.pop("vision_config", None)  # mlx-lm would build a vision tower, whose weights are never read
    check_layer_count(text, family, tensors)
    if not family.unwrapped:
        return mended
    text["model_type"] = family.module
    return text


def text_config(config: Config, family: Family) -> Config:
    """Returns the part of `config` that describes the text model."""
    for key in filter(None, family.text.split(".")):
        text = config.get(key)
        if not isinstance(text, dict):
            raise ModelError(f"config.json: {family.text} must be an object, found {text!r}")
        config = text
    return config


def context_length(config: Config, family: Family) -> int:
    """Returns the context length in tokens, from the first config field that has it or the family; 0 if unknown."""
    parts = (text_config(config, family), config)
    lengths = (part.get(field) for part in parts for field in _CONTEXT_FIELDS)
    found = next((length for length in lengths if type(length) is int and length > 0), family.context_default)
    return min(found, family.most_context or found)


def is_tied(config: Config, family: Family) -> bool:
    """Returns True if `config`, made by `module_config`, ties head and embedding: loading then reads no head."""
    return module_text(config, family).get("tie_word_embeddings") is True


def is_untied(config: Config, family: Family) -> bool:
    """Returns True if `config`, as read from the file, says that the head has weights of its own."""
    said = [part.get("tie_word_embeddings") for part in (config, text_config(config, family))]
    return False in said and True not in said


def module_text(config: Config, family: Family) -> Config:
    """Returns the part of `config`, made by `module_config`, that describes the text model."""
    return config if family.unwrapped else text_config(config, family)


def vocabulary_size(config: Config, family: Family, tensors: Mapping[str, LogicalTensor]) -> int:
    """Returns the number of tokens in the vocabulary: from the module's config, else from the embedding; else 0."""
    if family.library is not None and (rows := _vocabulary_rows(tensors)):
        return rows  # the library's classes may have another default
    for part in (module_text(config, family), config):
        found = part.get("vocab_size")
        if type(found) is int and found > 0:
            return found
    return _vocabulary_rows(tensors)


def _vocabulary_rows(tensors: Mapping[str, LogicalTensor]) -> int:
    shapes = (tensor.weight.shape for name, tensor in tensors.items() if name.endswith(EMBEDDINGS))
    return next((shape[0] for shape in shapes if shape), 0)


def _decide_tying(config: Config, text: Config, family: Family, tensors: Mapping[str, LogicalTensor]) -> None:
    """Sets `tie_word_embeddings`. In a listed family it is true if the file says so or has no output projection. In
    another family, a missing field is taken from the top level, or is false if there is an output projection. Some of
    mlx-lm's modules read a missing field as true and drop the projection: wrong logits without an error."""
    has_head = any(name.endswith(family.head) for name in tensors)
    said = [part.get("tie_word_embeddings") for part in (config, text)]
    if family.is_listed:
        text["tie_word_embeddings"] = True in said or not has_head
    elif said[1] is None and (said[0] is not None or has_head):
        text["tie_word_embeddings"] = False if said[0] is None else said[0]


def _check_fields(text: Config, family: Family) -> None:
    lacking = [key for key in family.required if text.get(key) is None]
    if lacking:
        raise ModelError(f"config.json lacks {', '.join(lacking)} (in {family.text or 'its top level'})")
    filled = [key for key, value in family.defaults.items() if value]
    for key in (*family.required, *filled, *_CHECKED_FIELDS, *_REAL_FIELDS):
        value = text.get(key)
        legal = (int, float) if key in _REAL_FIELDS else int
        if value is None or (isinstance(value, legal) and not isinstance(value, bool) and 0 < value < math.inf):
            continue
        raise ModelError(f"config.json: invalid {key}: {value!r}")
    hidden, heads, groups = (text.get(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return
    if text.get("head_dim", text.get("kv_lora_rank")) is None and hidden % heads:
        raise ModelError(f"config.json: hidden_size ({hidden}) must be divisible by num_attention_heads ({heads})")
    if isinstance(groups, int) and heads % groups:
        raise ModelError(
            f"config.json: num_attention_heads ({heads}) must be divisible by num_key_value_heads ({groups})"
        )
