"""Finds the head in an opened model, and loads it. If the head has a fault, the model is used without it."""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from runner.drafts.heads.head import Head, HeadDrafter, HeadModule, NemotronHead, QwenHead
from runner.drafts.target import target_of
from runner.errors import ModelError
from runner.logs import Log
from runner.model.opened import OpenedModel
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.trials import first_line
from runner.model.weights.experts import Weights, with_layout
from runner.model.weights.loading import LoadedModel, assemble_part, load_part
from runner.model.weights.packed import Arrays
from runner.model.weights.parameters import parameters_of

log = Log(__name__)

HEADS: dict[str, type[HeadModule]] = {
    "nemotron_h": NemotronHead,
    "qwen3_5": QwenHead,
    "qwen3_5_moe": QwenHead,
    "qwen3_next": QwenHead,
}
"""Module of mlx-lm for the target (`Family.module`) -> the class of the target's head."""

_HEAD = re.compile(r"(?:(?:model|language_model)\.)*mtp\.")
_BEGINS = re.compile(r"(?:fc|layers\.\d+\.eh_proj)\.weight")
"""A tensor that every head has. It shows that a package has a head; `config.json` may promise one that is missing."""
_TEXT_ONLY = ("quantization_config", "quantize_activations")
"""The fields of `config.json` that hold for the text model's layers, but not for the head's."""


class HeadPlan(NamedTuple):
    """A plan for loading the head of one model, made from headers alone. Immutable; holds no array."""

    kind: type[HeadModule]
    opened: OpenedModel
    """The opened model, but with the head's tensors, under the names that `kind.sanitize` knows."""
    shifted: frozenset[str]
    """The norms of the head whose stored weights are too small by 1."""


def plan_head(opened: OpenedModel) -> HeadPlan | None:
    """Returns the plan for the head of a model; None if the model has no head. Raises ModelError for a broken head."""
    kind = HEADS.get(opened.family.module)
    if kind is None:
        return None
    found = _own(opened.checkpoint.tensors)
    unreadable = _own(opened.checkpoint.unreadable)
    if not any(map(_BEGINS.fullmatch, (*found, *unreadable))):
        return None
    if unreadable:
        raise ModelError(f"tensor mtp.{min(unreadable)} cannot be read")
    for tensor in found.values():
        check_companions(tensor)
    names = kind.renamed(found.keys())
    if len(set(names.values())) < len(names):
        raise ModelError("two of its tensors are the same parameter")
    tensors = {names[name]: tensor._replace(name=names[name]) for name, tensor in found.items()}
    config = {key: value for key, value in opened.config.items() if key not in _TEXT_ONLY}
    shifted = _shifted(opened, tensors.keys()) if kind is QwenHead else set[str]()
    head = opened._replace(name="the head", tensors=tensors, config=config, unreadable=frozenset())
    return HeadPlan(kind, head, frozenset(shifted))


def load_head(
    opened: OpenedModel, loaded: LoadedModel, dtype: str = "keep", budget_bytes: int | None = None
) -> HeadDrafter | None:
    """Loads the head of the model `loaded`. Returns None if there is no head, or if it cannot be used: then the reason
    is logged. `dtype` is as for `weights.loading.load`; `budget_bytes` is the part of the budget that is left."""
    try:
        plan = plan_head(opened)
        return None if plan is None else _loaded(plan, loaded, dtype, budget_bytes)
    except ModelError as error:
        why = str(error)
    except Exception as error:  # MLX and mlx-lm may raise any exception
        why = first_line(error)
    log.warning("the model's head for drafts cannot be used", why=why)
    return None


def _loaded(plan: HeadPlan, loaded: LoadedModel, dtype: str, budget_bytes: int | None) -> HeadDrafter:
    target = target_of(loaded)

    def assemble(arrays: Mapping[str, Arrays]) -> HeadModule:
        return _assembled(plan, target.args, arrays)

    module = load_part(plan.opened, assemble, "the head", dtype, budget_bytes)
    drafter = HeadDrafter(Head(module, target))
    log.info("head for drafts loaded", bytes=sum(array.nbytes for array in parameters_of(module).values()))
    return drafter


def _own(tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Returns the tensors of the head, by their names without `mtp.` and what precedes it."""
    return {name[match.end() :]: tensor for name, tensor in tensors.items() if (match := _HEAD.match(name))}


def _shifted(opened: OpenedModel, names: Collection[str]) -> set[str]:
    """Returns the norms whose stored weights are too small by 1 (docs/internals/store.md, 1.6). These are all norms if
    the tensors are stored as in the source, which the shape of convolutions shows. Else, in a package of Ollama's
    store, these are the norms to which one release did not add 1."""
    convolutions = [part.weight for name, part in opened.tensors.items() if name.endswith("conv1d.weight")]
    raw = any(part.shape[-1] != 1 for part in convolutions)
    return QwenHead.norms(names, all_of_them=raw) if raw or opened.checkpoint.from_store else set()


def _assembled(plan: HeadPlan, args: object, arrays: Mapping[str, Arrays]) -> HeadModule:
    """Builds the head's module with `arrays`, which stay lazy. Raises ModelError if a tensor does not fit."""

    def sanitize(weights: Weights) -> tuple[HeadModule, Weights]:
        module = plan.kind.of_target(args, plan.opened.tensors.keys())
        with with_layout(weights, "stacked") as stacked:
            return module, plan.kind.sanitize(stacked, shifted=plan.shifted)

    return assemble_part(plan.opened, sanitize, arrays)
