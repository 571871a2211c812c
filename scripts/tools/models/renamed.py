"""Finds the fields that transformers has renamed, by trial of its configuration classes:
`python -m scripts.tools.models.renamed` writes the table in `runner/model/renamed.py`.

The tool writes each field of each of mlx-lm's config classes in the old form, with a few values; transformers reads it
and writes it again. If the new form does not mean the same to mlx-lm's class, a row is needed: the first one that gives
the right value for all of them. KNOWN has the rows that cannot be found like this, UNMAPPED the fields without a row.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import chain, islice
from typing import NamedTuple, cast
from unittest import mock

import transformers
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.models.base import BaseModelArgs
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runner.errors import ModelError
from runner.model import renamed
from runner.model.architectures import FAMILIES, RENAMED_MODULES
from runner.model.renamed import (
    FieldRow,
    apply_rows,
    constant,
    delta_layers,
    divided,
    each,
    every,
    flat,
    leading,
    letters,
    marks,
    numbers,
    of_kind,
    other_heads,
    scaled,
    spelt,
    times,
)
from scripts.tools import ROOT
from scripts.tools.models import data
from scripts.tools.models.architectures import architectures, config, module_of, values

Config = dict[str, object]
transformers.logging.set_verbosity_error()

_FILE = ROOT / "runner/model/renamed.py"
_WIDTH = 120
_TEXT = "text_config"
_NOT_FIELDS = ("model_type", _TEXT, "vision_config", "quantization", "modules")
_OWN: Mapping[str, Config] = data.read("renamed")
_ANY = tuple(row for row in renamed.ROWS if row.models == "*")
_SPARSE, _DENSE, _SLIDING, _FULL = "sparse", "dense", "sliding_attention", "full_attention"

KNOWN = (
    *_ANY,
    # Older files have these only at the top, and the module reads only the object.
    FieldRow("rope_parameters", "rope_theta", "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text", flat,
        "rope_theta partial_rotary_factor mrope_section"),
    # transformers does not know these names; its files say the same in other words.
    FieldRow("sliding_window_pattern", "layer_types", "exaone4", letters, f"{_SLIDING}=L {_FULL}=G", wins=True),
    FieldRow("rope_scaling", "rope_parameters", "exaone4 glm4_moe llama4 llama4_text", constant, "null"),
    FieldRow("head_dim", "hidden_size", "exaone4 exaone_moe glm4_moe qwen3_moe", divided, "num_attention_heads"),
    FieldRow("layer_types", "layer_types", "granitemoehybrid", spelt, f"linear_attention=mamba {_FULL}=attention",
        wins=True),
    FieldRow("is_moe_layer", "mlp_layer_types", "exaone_moe", marks, _SPARSE),
    FieldRow("first_k_dense_replace", "mlp_layer_types", "glm4_moe_lite kimi_linear", leading, _DENSE),
    FieldRow("linear_attn_config", "layer_types", "kimi_linear", delta_layers),
    FieldRow("hybrid_layer_pattern", "layer_types", "mimo_v2_flash", marks, _SLIDING),
    FieldRow("moe_layer_freq", "mlp_layer_types", "mimo_v2_flash", marks, _SPARSE),
    FieldRow("sliding_window_size", "sliding_window", "mimo_v2_flash", times, "1 -1"),
    FieldRow("layernorm_epsilon", "rms_norm_eps", "mimo_v2_flash"),
    FieldRow("swa_rope_theta", "rope_parameters.sliding_attention.rope_theta", "mimo_v2_flash"),
    FieldRow("partial_rotary_factor", "rope_parameters.full_attention.partial_rotary_factor", "mimo_v2_flash"),
    FieldRow("swa_num_attention_heads", "num_attention_heads", "mimo_v2_flash"),
    FieldRow("swa_num_key_value_heads", "num_key_value_heads", "mimo_v2_flash", times, "2"),
    FieldRow("swa_head_dim", "head_dim", "mimo_v2_flash"),
    FieldRow("swa_v_head_dim", "v_head_dim", "mimo_v2_flash"),
    FieldRow("rotary_dim", "rope_parameters.partial_rotary_factor", "minimax_m2", times, "head_dim", wins=True),
    FieldRow("rotary_dim", "head_dim", "minimax_m2"),
    FieldRow("rope_theta", "rope_parameters.full_attention", "step3p5", each, "rope_theta", wins=True),
    FieldRow("partial_rotary_factors", "rope_parameters.full_attention.partial_rotary_factor", "step3p5", each,
        "partial_rotary_factor"),
    FieldRow("yarn_only_types", "rope_parameters", "step3p5", scaled),
    FieldRow("attention_other_setting", "per_layer_config", "step3p5", other_heads,
        f"num_attention_heads of {_SLIDING}"),
    FieldRow("moe_layers_enum", "mlp_layer_types", "step3p5", numbers, _SPARSE),
    FieldRow("num_global_key_value_heads", "per_layer_config", "gemma4 gemma4_text gemma4_unified gemma4_unified_text",
        of_kind, f"num_key_value_heads of {_FULL} if attention_k_eq_v", wins=True),
    FieldRow("block_dim", "hidden_size", "lfm2 lfm2-vl"),
    FieldRow("n_ctx", "n_positions", "gpt2"),
    FieldRow("intermediate_size", "moe_intermediate_size", "solar_open"),
    FieldRow("intermediate_size", "expand", "mamba2", times, "hidden_size"),
    # Its null, which is the default, means no rotation.
    FieldRow("position_embedding_type", "", "granitemoehybrid", constant, '"nope"'),
    # transformers has no field for these, and uses these values.
    *(
        FieldRow(field, path, models, constant, value)
        for path, models, fields in (
            ("hidden_act", "apertus", {"mlp_bias": "false", "post_norm": "false", "qk_norm": "true"}),
            ("n_routed_experts", "dots1", {"scoring_func": '"sigmoid"'}),
            ("index_topk", "glm_moe_dsa",
             {"topk_method": '"noaux_tc"', "scoring_func": '"sigmoid"', "moe_layer_freq": "1"}),
            ("linear_head_dim", "kimi_linear", {"rope_theta": "10000.0"}),
            ("zero_expert_num", "longcat_flash",
             {"attention_method": '"MLA"', "zero_expert_type": '"identity"', "mla_scale_q_lora": "true",
              "mla_scale_kv_lora": "true"}),
            ("layer_types", "mimo_v2_flash",
             {"add_swa_attention_sink_bias": "true", "add_full_attention_sink_bias": "false",
              "topk_method": '"noaux_tc"', "scoring_func": '"sigmoid"', "n_shared_experts": "null"}),
            ("num_local_experts", "minimax_m2", {"shared_intermediate_size": "0"}),
            ("n_routed_experts", "solar_open", {"first_k_dense_replace": "0", "partial_rotary_factor": "1.0"}),
            ("num_local_experts", "qwen3_vl_moe qwen3_vl_moe_text", {"norm_topk_prob": "true"}),
        )
        for field, value in fields.items()
    ),
)  # fmt: skip
"""Rows that cannot be found by trial."""

UNMAPPED = {
    ("apertus", "rope_theta"): "transformers loses it, unless the rotation is scaled",
    ("bailing_hybrid", "group_norm_size"): "transformers' class of this name is of a model without that norm",
    ("cohere2_moe", "first_k_dense_replace"): "the module reads mlp_layer_types itself",
    ("minimax_m3_vl", "moe_layer_freq"): "the module reads mlp_layer_types itself",
    ("nemotron_h", "layer_types"): "the module reads layers_block_type itself",
}
"""A module and a field -> the reason why it has no row."""

_ROTARY = ("rope_theta", "partial_rotary_factor")
_UNDECIDED = re.compile(
    r"(.+_)?(size|dim|head|heads|layers|rank|groups|state|conv|ssm|experts|bias|window|types|scaling|parameters|idxs|index)"
    r"|max_position_embeddings|model_max_length|tie_word_embeddings|(index|first|layer|moe_layer|num_nextn|pad|bos|eos)_.+"
)
"""Fields whose default decides nothing here: a wrong size does not fit the tensors, and windows, heads, contexts and
what scales the rotation are read elsewhere."""
_OLLAMAS = {each.module for family in FAMILIES.values() for each in (family, family.flat or family)}
"""Modules of models that Ollama serves, whose defaults are its own."""

_OTHER_CLASS = {"minimax", "pixtral"}
"""Values of `model_type` for which transformers' class is of another model than mlx-lm's module."""


class Pair(NamedTuple):
    """A class of transformers, and mlx-lm's class that reads what it writes."""

    module: str
    model_type: str
    """The `model_type` of the part of a config that has the fields."""
    theirs: type[PreTrainedConfig]
    args: type[BaseModelArgs]

    @property
    def models(self) -> set[str]:
        """The names by which a row is found."""
        return {self.module, self.model_type}

    @property
    def fields(self) -> "dict[str, dataclasses.Field[object]]":
        """The fields of mlx-lm's class."""
        return {field.name: field for field in dataclasses.fields(self.args) if field.name not in _NOT_FIELDS}

    def old(self) -> Config:
        """Returns every field under mlx-lm's name."""
        wanted = ({field.name: field.type for field in dataclasses.fields(each)} for each in (self.args, self.theirs))
        known, hints = values(self.module), [*wanted]
        found = {name: known.get(name, field.default) for name, field in self.fields.items()}
        typed = {name: _typed(value, *(hint.get(name) for hint in hints)) for name, value in found.items()}
        chosen = {**typed, **_OWN.get(self.module, {})}
        return {name: deepcopy(value) for name, value in chosen.items() if value not in (None, dataclasses.MISSING)}

    def saved(self, part: Config) -> Config:
        """Returns what transformers writes for such a model. Raises what its class raises."""
        return cast("Config", json.loads(json.dumps(self.theirs.from_dict(deepcopy(part)).to_dict())))

    def read(self, part: Config, field: str, base: Config, rows: Iterable[FieldRow]) -> object:
        """Returns a field of mlx-lm's class after this runner has applied these rows to a config. Other fields that the
        class requires come from `base`. Raises TypeError without the field."""
        part = {**deepcopy(part), "model_type": self.model_type}
        apply_rows(rows, part)
        needed = {name: base[name] for name, each in self.fields.items() if name in base and is_required(each)}
        needed.pop(field, None)
        known = {each.name for each in dataclasses.fields(self.args)}  # as in from_dict, which asks for each anew
        return getattr(self.args(**{name: value for name, value in {**needed, **part}.items() if name in known}), field)


def is_required(field: "dataclasses.Field[object]") -> bool:
    """Returns True for a field of mlx-lm's that a config must have."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _typed(value: object, *hints: object) -> object:
    """Returns a number in the type that a class insists on."""
    for hint in hints:
        kinds = typing.get_args(hint) or (hint,)
        for kind, other in ((float, int), (int, float), (bool, int)):
            if type(value) is other and kind in kinds and other not in kinds:
                value = kind(cast("int", value))
    return value


@cache
def pairs() -> tuple[Pair, ...]:
    """Returns all pairs of classes."""
    return tuple(chain.from_iterable(pairs_of(name) for name in architectures() if name != "olmo"))


def pairs_of(name: str) -> Iterator[Pair]:
    """Yields the pairs of one module."""
    args = module_of(name).ModelArgs
    nested = _TEXT in {field.name for field in dataclasses.fields(args)}
    others = [other for other, module in RENAMED_MODULES.items() if module == name]
    alias = ["bailing_hybrid"] if name == "bailing_moe_v3" else []
    for model_type in dict.fromkeys((name.replace("-", "_"), *others, *alias)):
        if model_type not in CONFIG_MAPPING or model_type in _OTHER_CLASS:
            continue
        theirs = CONFIG_MAPPING[model_type]
        text = (theirs.sub_configs_defaults or {}).get(_TEXT)
        if text is not None:
            model_type, theirs = text.model_type, CONFIG_MAPPING[text.model_type]
        yield Pair(name, model_type, theirs, _text_args(name) if nested else args)


@cache
def _text_args(name: str) -> type[BaseModelArgs]:
    """Returns the class that mlx-lm's module makes of its `text_config`."""
    module, made = module_of(name), []
    from_dict = BaseModelArgs.__dict__["from_dict"].__func__

    def note(args: type[BaseModelArgs], params: Config) -> BaseModelArgs:
        made.append(args)
        return cast("BaseModelArgs", from_dict(args, params))

    with mock.patch.object(BaseModelArgs, "from_dict", classmethod(note)):
        module.Model(module.ModelArgs.from_dict(config(name)))
    return next(args for args in made if args is not module.ModelArgs)


_SCALING = {"type": "linear", "rope_type": "linear", "factor": 4.0}
_VALUES = 2
_MISSING = object()
_REFUSALS = (
    NotImplementedError,
    TypeError,
    ValueError,
    LookupError,
    ZeroDivisionError,
    StrictDataclassError,
    ModelError,
)
"""Exceptions of transformers, mlx-lm and this runner for values that do not fit together."""


class Probe(NamedTuple):
    """The new form of a config, and the value of a field that mlx-lm's class reads from the old form."""

    new: Config
    wanted: object


def _probes(pair: Pair, base: Config, saved: Config, field: str, rows: Sequence[FieldRow]) -> Iterator[Probe]:
    options = [base[field], *_others(base[field])] if field in base else []
    if field == "rope_scaling" and "rope_parameters" not in base:
        options = [_SCALING]
    for value in options:
        old = {**base, field: value}
        try:
            yield Probe(saved if old == base else pair.saved(old), pair.read(old, field, base, rows))
        except _REFUSALS:
            continue


def _others(value: object) -> Iterator[object]:
    """Yields other values of the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2, value + 2, value * 4, value - 1)
    elif isinstance(value, float):
        yield from (value * 1.5 if value else 0.5, value / 2)


def _is_said(pair: Pair, base: Config, field: str, probes: Sequence[Probe]) -> bool:
    """Returns True if the new form depends on the field, apart from the name itself."""
    try:
        without = pair.saved({name: value for name, value in base.items() if name != field})
    except _REFUSALS:
        return True
    return any({name: value for name, value in new.items() if name != field} != without for new, _ in probes)


def same(left: object, right: object) -> bool:
    """Returns True if two values mean the same to mlx-lm's classes."""
    if isinstance(left, dict) and isinstance(right, dict):
        return all(same(value, right.get(key, _MISSING)) for key, value in left.items() if key != "rope_theta")
    if isinstance(right, list) and not isinstance(left, list | tuple | str):
        return all(value == left for value in right)
    return [*left] == [*right] if isinstance(left, tuple | str) and isinstance(right, list) else left == right


def _fits(pair: Pair, base: Config, field: str, probes: Sequence[Probe], rows: Sequence[FieldRow]) -> bool:
    try:
        return all(same(wanted, pair.read(new, field, base, rows)) for new, wanted in probes)
    except _REFUSALS:
        return False


def _candidates(field: str, new: Config, *, wins: bool) -> Iterator[FieldRow]:
    leaves = dict(_leaves(new))
    for path in sorted((path for path in leaves if path[0] != "_"), key=lambda path: (path.count("."), path)):
        yield FieldRow(field, path, "", wins=wins)
    for path, value in leaves.items():
        if isinstance(value, list) and value and all(isinstance(kind, str) for kind in value):
            for kind in sorted(set(value)):
                yield from (FieldRow(field, path, "", read, kind, wins=True) for read in (every, leading, marks))
    layers = cast("Mapping[str, Config]", new.get("per_layer_config") or {})
    for name in sorted({name for fields in layers.values() for name in fields}):
        for kind in sorted(set(cast("list[str]", new["layer_types"]))):
            yield FieldRow(field, "per_layer_config", "", of_kind, f"{name} of {kind}", wins=True)


def _leaves(part: Config, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in part.items():
        if isinstance(value, dict) and key != "per_layer_config":
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "per_layer_config":
            yield prefix + key, value


class Fault(NamedTuple):
    """A field that mlx-lm's class does not find in the new form."""

    pair: Pair
    field: str
    row: FieldRow | None


def faults(pair: Pair, known: Sequence[FieldRow]) -> Iterator[Fault]:
    """Yields the fields that need a row in addition to `known`, each with that row if one was found."""
    base, written = pair.old(), pair.saved({}).keys()
    saved = pair.saved(base)
    rows = [row for row in known if _concerns(row, pair)]
    for field in pair.fields:
        probes = [*islice(_probes(pair, base, saved, field, rows), _VALUES)]
        forms = [probes]
        if field not in written and _is_said(pair, base, field, probes):
            forms.append([Probe({k: v for k, v in new.items() if k != field}, wanted) for new, wanted in probes])
        if all(_fits(pair, base, field, form, rows) for form in forms):
            continue
        options = _candidates(field, probes[0].new, wins=any(field in new for new, _ in forms[-1]))
        fitting = (row for row in options if all(_fits(pair, base, field, form, [*rows, row]) for form in forms))
        yield Fault(pair, field, next(fitting, None))


def defaults(pair: Pair, rows: Iterable[FieldRow]) -> Iterator[FieldRow]:
    """Yields a row for each field without which a file means another value to transformers than to mlx-lm."""
    known, part = {field.name: field.default for field in dataclasses.fields(pair.theirs)}, pair.saved({})
    apply_rows((row for row in rows if row.path and _concerns(row, pair)), part)
    for name, field in pair.fields.items():
        value = part.get(name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        decides = not is_required(field) and not _UNDECIDED.fullmatch(name) and value is not None
        is_fixed = isinstance(value, float) if name in _ROTARY else same(known.get(name), value)
        if decides and is_fixed and not same(value, default):
            yield FieldRow(name, "", "", constant, json.dumps(value))


def _concerns(row: FieldRow, pair: Pair) -> bool:
    return row.models == "*" or not pair.models.isdisjoint(row.models.split())


def find_rows() -> tuple[FieldRow, ...]:
    """Returns all rows. Raises ValueError for a field without a row that is not in UNMAPPED."""
    models: dict[FieldRow, set[str]] = {}
    for pair in pairs():
        for fault in faults(pair, KNOWN):
            reason = UNMAPPED.get((pair.module, fault.field))
            if fault.row is None and reason is None:
                raise ValueError(
                    f"{pair.module} ({pair.model_type}): {fault.field} has no row: add it to KNOWN or UNMAPPED"
                )
            if fault.row is not None and reason is None:
                models.setdefault(fault.row, set()).update(pair.models)
    rows = [*KNOWN, *_with_models(models)]
    models = {}
    for pair in pairs():
        if pair.module not in _OLLAMAS:
            for row in defaults(pair, rows):
                models.setdefault(row, set()).add(pair.model_type)
    rows = sorted(
        (*rows[len(_ANY) :], *_with_models(models)), key=lambda row: (not row.path, row.field, row.models, row.path)
    )
    return (*_ANY, *rows)


def _with_models(models: Mapping[FieldRow, set[str]]) -> Iterator[FieldRow]:
    return (row._replace(models=" ".join(sorted(names))) for row, names in models.items())


def table(rows: Iterable[FieldRow]) -> str:
    """Returns the source of a table of these rows."""
    return f"ROWS: tuple[FieldRow, ...] = (\n{''.join(map(_source, rows))})  # fmt: skip\n"


def _source(row: FieldRow) -> str:
    words = [_quoted(text) for text in (row.field, row.path, row.models)]
    words += [row.read.__name__] if row.read else []
    words += [_quoted(row.about)] if row.about else []
    words += ["wins=True"] if row.wins else []
    lines = [f"    FieldRow({words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + len(", ),") > _WIDTH:
            lines[-1] += ","
            lines.append(f"        {word}")
        else:
            lines[-1] += f", {word}"
    return "\n".join(lines) + "),\n"


def _quoted(text: str) -> str:
    return repr(text) if '"' in text else f'"{text}"'


def written(text: str, rows: Sequence[FieldRow]) -> str:
    """Returns the text of the module with this table."""
    return re.sub(r"(?<=# begin\n).*(?=# end\n)", lambda _: table(rows), text, flags=re.DOTALL)


if __name__ == "__main__":
    _FILE.write_text(written(_FILE.read_text(), find_rows()))
