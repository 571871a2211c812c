"""Checks that an assistant fits its target, and loads it."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__

# isort: split
from mlx_lm.models.gemma4_text import ModelArgs

from runner.errors import ModelError
from runner.logs import Log, error_line
from runner.model.assistant.context import Place, Shared, places_of
from runner.model.assistant.module import AssistantModule
from runner.model.assistant.opening import is_tied, kinds_of, sizes_of
from runner.model.config import text_config
from runner.model.heads.target import Target, target_of
from runner.model.opened import OpenedModel
from runner.model.weights.assemble import placeholders
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.load import LoadedModel
from runner.model.weights.packed import Arrays
from runner.model.weights.parameters import parameters_of
from runner.model.weights.part import assemble_part, load_part, plan_part

log = Log(__name__)

_ORDERING = "masked_embedding.token_ordering"


class Assistant(NamedTuple):
    """An assistant and the parts of its target that it uses. Owner: the engine thread."""

    module: AssistantModule
    target: Target
    scale: float
    """Of the target's rows."""
    places: Mapping[str, Place]
    kinds: frozenset[str]
    """The kinds of its layers."""
    suppressed: tuple[int, ...] = ()
    """Tokens that must never be chosen."""

    def step(
        self, tokens: mx.array, hidden: mx.array, shared: Mapping[str, Shared], position: int
    ) -> tuple[mx.array, mx.array]:
        """Returns logits [1, 1, V] of the token behind `tokens` [1, 1], and the hidden state [1, 1, D] for the step
        after it. `hidden` is the state before `tokens`; the rest is as in `AssistantModule`. Lazy."""
        logits, behind = self.module(self.target.embed(tokens) * self.scale, hidden, shared, position)
        if self.suppressed:
            logits = logits.at[..., mx.array(self.suppressed)].minimum(-mx.inf)
        return logits, behind

    @property
    def nbytes(self) -> int:
        """The bytes of its own weights."""
        return sum(array.nbytes for array in parameters_of(self.module).values())


def check_target(opened: OpenedModel, target: OpenedModel, module: Module) -> None:
    """Raises ModelError unless an assistant fits the target, whose module may be made of placeholders."""
    rehearsed, places, width = _assembled(opened, placeholders(opened)), places_of(module), _width(module)
    backbone = sizes_of(opened).backbone
    if backbone != width:
        raise ModelError(f"it drafts for a model that is {backbone} wide, and this one is {width} wide")
    if opened.vocab_size != target.vocab_size:
        raise ModelError(
            f"it has another vocabulary than the model: {opened.vocab_size} tokens instead of {target.vocab_size}"
        )
    for layer in rehearsed.model.layers:
        kind, place = layer.layer_type, places.get(layer.layer_type)
        if place is None:
            raise ModelError(f"it looks at layers of {kind}, of which the model has none")
        attention = layer.self_attn
        if attention.head_dim != place.width or attention.n_heads % place.heads:
            raise ModelError(
                f"its {attention.n_heads} heads of {attention.head_dim} numbers cannot look at the model's"
                f" {place.heads} heads of {place.width} ({kind})"
            )


def load_assistant(
    opened: OpenedModel,
    loaded: LoadedModel,
    dtype: str = "keep",
    budget_bytes: int | None = None,
    *,
    slow_blas: bool = False,
) -> Assistant:
    """Loads an assistant that `check_target` let pass, for a target that is loaded.

    The arguments are those of `weights.load.load`, with what the target has left of the budget. Raises ModelError, and
    what MLX raises at the first forward.
    """
    module = load_part(opened, partial(_assembled, opened), "the assistant", dtype, budget_bytes, slow_blas=slow_blas)
    _check_ordering(module)
    text = cast("Module", getattr(loaded.module, "language_model", loaded.module))
    assistant = Assistant(
        module,
        target_of(loaded.module),
        text["model"].embed_scale,
        places_of(loaded.module),
        frozenset(kinds_of(opened)),
        loaded.suppressed,
    )
    mx.eval(_tried(assistant))
    return assistant


def plan_assistant(
    opened: OpenedModel, dtype: str, budget_bytes: int | None, *, slow_blas: bool
) -> tuple[AssistantModule, DtypePlan]:
    """Returns an assistant made of placeholders, and the types of its weights. Raises ModelError if anything does not
    fit, or exceeds the budget."""
    return plan_part(opened, partial(_assembled, opened), dtype, budget_bytes, slow_blas=slow_blas)


def _assembled(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> AssistantModule:
    """Builds the module with `arrays`, which stay lazy. Raises ModelError if anything does not fit."""
    return assemble_part(opened, lambda weights: (_built(opened), weights), arrays)


def _built(opened: OpenedModel) -> AssistantModule:
    text = text_config(opened.module_config, opened.family)
    layers = len(kinds_of(opened))
    # No layer of an assistant has keys and values, experts, or inputs of its own.
    fixed = {"num_kv_shared_layers": layers, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
    try:
        return AssistantModule(ModelArgs.from_dict({**text, **fixed}), sizes_of(opened), tied=is_tied(opened))
    except Exception as error:
        raise ModelError(f"config.json does not fit an assistant: {error_line(error)}") from error


def _check_ordering(module: AssistantModule) -> None:
    """Raises ModelError unless each token is in one group: MLX reads any place that it is told to."""
    ordering = parameters_of(module).get(_ORDERING)
    if ordering is not None and not mx.array_equal(mx.sort(ordering), mx.arange(ordering.size)).item():
        raise ModelError(f"tensor {_ORDERING} does not name each token once")


def _tried(assistant: Assistant) -> tuple[mx.array, mx.array]:
    """Returns what it makes of a token behind another one: MLX refuses some layers only when they compute."""
    tokens = mx.zeros((1, 1), mx.uint32)
    hidden = assistant.target.embed(tokens)
    shared = {
        kind: Shared(*(mx.zeros((1, place.heads, 1, place.width), hidden.dtype) for _ in range(2)))
        for kind, place in assistant.places.items()
    }
    return assistant.step(tokens, hidden, shared, 0)


def _width(module: Module) -> int:
    return cast("int", target_of(module).norm["weight"].shape[0])
