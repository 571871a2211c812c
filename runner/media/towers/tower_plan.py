"""Finds the towers of an opened model, checks them by the headers of its files, and loads them. A fault in a tower
disables pictures or sound, never text."""

import re
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from runner.errors import ModelError, UnknownError
from runner.media.towers.gemma4 import BOUNDS, Gemma4Tower, Gemma4UnifiedTower
from runner.media.towers.gemma4_sound import Gemma4SoundTower, Gemma4UnifiedSoundTower
from runner.media.towers.glimmer import GlimmerTower
from runner.media.towers.nemotron_h import NemotronTower
from runner.media.towers.qwen3_5 import Qwen35Tower
from runner.media.towers.tower import MediaTower, SoundTower, Tower
from runner.model.opened import OpenedModel
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.weights.assembly import placeholders
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.experts import Weights
from runner.model.weights.loading import assemble_part, plan_part, read_part
from runner.model.weights.packed import Arrays, Recipe, sanitize_packed
from runner.model.weights.parameters import parameters_of

AnyTower = TypeVar("AnyTower", bound=MediaTower)


class TowerRow(NamedTuple, Generic[AnyTower]):
    """The tower of a family of models. `name` is the name of the tower in messages."""

    name: str
    tower: type[AnyTower]
    others: Mapping[str, type[AnyTower]] = MappingProxyType({})
    """`model_type` of the `vision_config` or `audio_config` -> the tower that replaces `tower`."""
    preprocessor: tuple[str, ...] = ()
    """Fields of `preprocessor_config.json` that override those of `config.json`."""

    def kind(self, description: object) -> type[AnyTower]:
        """Returns the class for this `vision_config` or `audio_config`."""
        if not isinstance(description, dict):
            return self.tower
        return self.others.get(str(description.get("model_type")), self.tower)


_QWEN3_5 = TowerRow[Tower]("qwen3.5", Qwen35Tower)

TOWERS: dict[str, TowerRow[Tower]] = {
    "gemma4": TowerRow("gemma4", Gemma4Tower, {"gemma4_unified_vision": Gemma4UnifiedTower}),
    "embedding_gemma2": TowerRow("gemma4", Gemma4Tower),
    "muse_glimmer": TowerRow("glimmer", GlimmerTower),
    "nemotron_h": TowerRow(
        "nemotron_h", NemotronTower, preprocessor=("norm_mean", "norm_std", "patch_size", "downsample_ratio")
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_next": _QWEN3_5,
}
"""mlx-lm module of the text model (`Family.module`) -> its tower for pictures."""
SOUND_TOWERS: dict[str, TowerRow[SoundTower]] = {
    "embedding_gemma2": TowerRow("gemma4", Gemma4SoundTower),
    "gemma4": TowerRow("gemma4", Gemma4SoundTower, {"gemma4_unified_audio": Gemma4UnifiedSoundTower}),
}
"""mlx-lm module of the text model (`Family.module`) -> its tower for sounds."""
PREPROCESSOR = "preprocessor_config.json"
_TEXT_ONLY = ("quantization_config", "quantize_activations")
"""Fields of `config.json` that are about the text model's layers."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NUMBERED = re.compile(r".*?\.\d+(?=\.)")


class TowerPlan(NamedTuple, Generic[AnyTower]):
    """The plan for loading one tower of a model. A plan holds no array."""

    family: str
    kind: type[AnyTower]
    opened: OpenedModel
    """The opened model with the tower's tensors instead of the text model's, named for `MediaTower.sanitize`, and with
    the tower's config."""
    fault: str = ""
    """The reason why the tower cannot be loaded."""
    unknown: bool = False
    """True if another runner may be able to load the tower in spite of the fault."""

    @property
    def nbytes(self) -> int:
        """The bytes that loading the tower reads; 0 if the plan has a fault."""
        return 0 if self.fault else self.opened.total_bytes

    @property
    def blocks(self) -> int:
        """The number of the tower's blocks that have tensors."""
        return len({found[0] for name in self.opened.tensors if (found := _NUMBERED.match(name))})


def plan_tower(opened: OpenedModel) -> TowerPlan[Tower] | None:
    """Returns the plan of a model's tower for pictures, made by headers alone; None if the model has none."""
    row = TOWERS.get(opened.family.module)
    return row and _plan(opened, row, "vision_config", "vision tower")


def plan_sound_tower(opened: OpenedModel) -> TowerPlan[SoundTower] | None:
    """Returns the plan of a model's tower for sounds, as `plan_tower` does for pictures."""
    row = SOUND_TOWERS.get(opened.family.module)
    return row and _plan(opened, row, "audio_config", "sound tower")


def _plan(opened: OpenedModel, row: TowerRow[AnyTower], key: str, what: str) -> TowerPlan[AnyTower] | None:
    """Returns the plan. `key` is the field of config.json that describes the tower; `what` names the tower."""
    description = opened.config.get(key)
    kind = row.kind(description)
    checkpoint = opened.checkpoint
    tensors = _renamed(kind, checkpoint.tensors)
    unreadable = _renamed(kind, checkpoint.unreadable)
    described, absent = isinstance(description, dict), not tensors and not unreadable
    if absent and (not described or opened.family.is_encoder):
        return None  # the config of an encoder describes towers even if the model lacks them
    name = f"the {row.name} tower" + (" for sound" if issubclass(kind, SoundTower) else "")
    tower = opened._replace(name=name, tensors=tensors)
    plan = TowerPlan(row.name, kind, tower)
    if absent:
        fault = f"config.json describes a {what}, but none of its tensors is in the model"
        return plan._replace(fault=kind.absent if issubclass(kind, SoundTower) else fault)
    if not described:
        return plan._replace(fault=f"the model has tensors of a {what}, but config.json has no {key}")
    if unreadable:
        return plan._replace(fault=f"tensor {min(unreadable)} of the {what} cannot be read")
    try:
        _check_twins(kind, checkpoint.tensors, what)
        for tensor in tensors.values():
            check_companions(tensor)
        return _rehearsed(plan._replace(opened=tower._replace(config=_tower_config(opened, row))))
    except ModelError as error:
        return plan._replace(fault=str(error), unknown=isinstance(error, UnknownError))


def plan_weights(plan: TowerPlan[AnyTower], dtype: str, budget_bytes: int | None) -> tuple[AnyTower, DtypePlan]:
    """Returns the tower made of placeholders, and the types of its weights. `dtype` and `budget_bytes` are as in
    `weights.loading.load`. Raises ModelError for a plan with a fault, and for weights that exceed the budget."""
    if plan.fault:
        raise ModelError(plan.fault)
    try:
        return plan_part(plan.opened, partial(_assembled, plan), dtype, budget_bytes)
    except ModelError as error:
        raise ModelError(f"{plan.opened.name}: {error}") from error


def load_tower(plan: TowerPlan[AnyTower], dtype: str = "keep", budget_bytes: int | None = None) -> AnyTower:
    """Reads the weights and builds the tower, on the engine thread. Raises ModelError as `plan_weights` does, and if
    reading fails."""
    types = plan_weights(plan, dtype, budget_bytes)[1]
    return read_part(plan.opened, partial(_assembled, plan), "the tower", types)


def _renamed(kind: type[MediaTower], tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Returns the tower's tensors, under the names of its parameters."""
    named = ((kind.parameter_name(name), tensor) for name, tensor in tensors.items())
    return {name: tensor._replace(name=name) for name, tensor in named if name is not None}


def _check_twins(kind: type[MediaTower], tensors: Mapping[str, LogicalTensor], what: str) -> None:
    """Raises ModelError for two tensors that would become one parameter."""
    seen: dict[str, str] = {}
    for stored in tensors:
        name = kind.parameter_name(stored)
        if name is not None and (other := seen.setdefault(name, stored)) != stored:
            raise UnknownError(f"tensors {other} and {stored} of the {what} are the same parameter")


def _tower_config(opened: OpenedModel, row: TowerRow[AnyTower]) -> dict[str, object]:
    """Returns `config.json` without fields about the text model, overridden by fields of the preprocessor's file."""
    config = {key: value for key, value in opened.config.items() if key not in _TEXT_ONLY}
    if not row.preprocessor:
        return config
    found = opened.json_file(PREPROCESSOR)
    return config | {key: found[key] for key in row.preprocessor if found.get(key)}


def _rehearsed(plan: TowerPlan[AnyTower]) -> TowerPlan[AnyTower]:
    """Returns the plan without tensors that the tower does not use. Raises ModelError if a trial of building fails."""
    tower, weights = sanitize_packed(
        lambda found, _: _made(plan, found), placeholders(plan.opened), Recipe("as stored")
    )
    wanted = parameters_of(tower).keys()
    if issubclass(plan.kind, SoundTower):
        _refuse_missing(wanted - weights.keys())
    spare = [name for name in plan.opened.tensors if name in weights and name not in wanted]
    forms = {_NUMBER.sub("*", name) for name in wanted}
    if beyond := next((name for name in spare if _NUMBER.sub("*", name) in forms), None):
        raise UnknownError(f"{plan.opened.name} has {beyond}, but config.json describes fewer blocks")
    needed = {name: tensor for name, tensor in plan.opened.tensors.items() if name not in spare}
    plan = plan._replace(opened=plan.opened._replace(tensors=needed))
    _assembled(plan, placeholders(plan.opened))
    return plan


def _refuse_missing(names: Collection[str]) -> None:
    """Raises ModelError, in Ollama's words, for the first missing parameter in `names` that is no bound."""
    missing = min((name.replace(".linear.", ".") for name in names if not name.endswith(BOUNDS)), default="")
    if missing.startswith("embedding_projection."):
        raise ModelError(f"missing weight: embed_audio.{missing}")
    if missing:
        raise ModelError(f"missing audio weight: {missing}")


def _assembled(plan: TowerPlan[AnyTower], arrays: Mapping[str, Arrays]) -> AnyTower:
    """Returns the tower built with `arrays`, which stay lazy. Raises ModelError for arrays that do not fit."""
    return assemble_part(plan.opened, partial(_made, plan), arrays)


def _made(plan: TowerPlan[AnyTower], weights: Weights) -> tuple[AnyTower, Weights]:
    """Returns a tower with random parameters, and its sanitized weights. Raises ModelError if a weight does not fit."""
    tower = plan.kind(plan.opened.config)
    try:
        return tower, tower.sanitize(dict(weights))
    except (ValueError, IndexError, KeyError) as error:  # MLX raises these for shapes that do not fit
        raise ModelError(f"{plan.opened.name} cannot take its tensors: {error}") from error
