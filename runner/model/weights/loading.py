"""Loads the weights of an opened model, in bounded groups, into an mlx-lm module, or into a part beside it.

Every array is made, read and evaluated on the thread that calls `load`.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from runner.cpu.pages import use_huge_pages
from runner.device import device
from runner.errors import ModelError, ReadError
from runner.logs import Log
from runner.model.architectures import DECIDERS, ENCODERS, TRIED, UNBATCHABLE, UNDRAFTABLE, Library
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.weights.assembly import assemble_module, fill, placeholders, rehearse
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.expert_reader import ExpertReader, find_expert_stacks, outside_stacks
from runner.model.weights.experts import Weights
from runner.model.weights.mended import unread
from runner.model.weights.packed import Arrays, Recipe, sanitize_packed
from runner.model.weights.parameters import dispatch_early, parameters_of, shorten_lookups
from runner.model.weights.quantized_layers import widen_embeddings
from runner.model.weights.reading import check_readable, parts_of, read_arrays

log = Log(__name__)
Part = TypeVar("Part", bound=Module)
"""A module beside the text model, such as a tower, a head, an assistant or a DFlash draft."""
Builder = Callable[[Mapping[str, Arrays]], Part]
"""A function that builds a part from arrays, which stay lazy."""

_MADE_BYTES = 64 << 20
"""The bytes of parameters to evaluate together. Meanwhile the arrays from which they are made take memory too."""


class LoadedModel(NamedTuple):
    """A loaded model. Only the thread that loaded it may run it."""

    module: Module
    suppressed: tuple[int, ...] = ()
    """The ids of tokens that must never be chosen."""
    library: Library | None = None
    """The package that has the module; None for mlx-lm."""

    @property
    def unbatchable(self) -> str:
        """The reason why this model must not compute several answers in one forward; else empty."""
        if any(isinstance(layer, DynamicNTKScalingRoPE) for layer in self.module.modules()):
            return "its dynamic rotary base follows from the length of a single answer"
        return self._why_not(UNBATCHABLE)

    @property
    def undraftable(self) -> str:
        """The reason why answers of this model must not be drafted; else empty."""
        return self._why_not(UNDRAFTABLE)

    def _why_not(self, reasons: Mapping[str, str]) -> str:
        name = type(self.module).__module__.rpartition(".")[2]
        if name in ENCODERS or name in DECIDERS.values():
            return "it makes no text"
        if self.library is not None:
            return self.library.why_not(name, batches=reasons is UNBATCHABLE)
        return reasons.get(name, "" if name in TRIED else f"mlx_lm.models.{name} was never tried: see check --verify")

    @property
    def has_16_bit_experts(self) -> bool:
        """True if there are unpacked 16-bit experts. On a CPU, the first forward that uses them raises an error."""
        # mlx-vlm has a class of the same name.
        experts = (each for each in self.module.modules() if type(each).__name__ == SwitchLinear.__name__)
        return any(layer.weight.dtype in (mx.bfloat16, mx.float16) for layer in experts)

    @property
    def is_packed(self) -> bool:
        """True if the module has packed linear layers, but no layers of experts."""
        kinds = {type(each) for each in self.module.modules()}
        return QuantizedLinear in kinds and not kinds & {SwitchLinear, QuantizedSwitchLinear}

    @property
    def dtypes(self) -> list[str]:
        """The types of the parameters in memory."""
        return sorted({str(array.dtype) for array in parameters_of(self.module).values()})

    def make_layers(self) -> list[object]:
        """Returns fresh layer caches for one sequence: one for each layer of the model that keeps a state."""
        return list(make_prompt_cache(self.module))

    def logits(self, tokens: mx.array, layers: list[object]) -> mx.array:
        """Returns the lazy logits [B, L, V] of `tokens` [B, L], which follow the tokens in the caches `layers`. The
        forward adds `tokens` to the caches."""
        scores = cast("mx.array", self.module(tokens, cache=layers))
        return scores.at[..., mx.array(self.suppressed)].minimum(-mx.inf) if self.suppressed else scores


def load(opened: OpenedModel, dtype: str = "keep", budget_bytes: int | None = None) -> LoadedModel:
    """Reads the weights and builds the module.

    Checks shapes, names, types and sizes before it reads the first byte. `dtype` is one of `settings.DTYPES`; the log
    names the type that it means for this model.

    Raises:
        ModelError: a file or tensor does not fit, or the weights exceed the budget.
        ReadError: reading failed after these checks.
    """
    rehearsed, recipe = rehearse(opened)
    types = _fitting(rehearsed, dtype, budget_bytes, logs=True)
    del rehearsed
    try:
        module = _filled(opened, recipe, types)
    except ModelError as error:
        raise ReadError(str(error)) from error
    settle(module, types)
    if device() == "cpu":
        dispatch_early(module)
    return finished(opened, module)


def _fitting(rehearsed: Module, dtype: str, budget_bytes: int | None, *, logs: bool = False) -> DtypePlan:
    """Returns the types of a module's weights. Raises ModelError if the weights exceed the budget."""
    types = plan_dtypes(dtype, rehearsed, budget_bytes)
    if logs:
        types.log_choice()
    if too_large := types.over_budget(budget_bytes, rehearsed):
        raise ModelError(too_large)
    return types


def finished(opened: OpenedModel, module: Module) -> LoadedModel:
    """Returns the loaded model of a module that has its weights. Warns of config fields that the module ignores."""
    for warning in unread(opened, module):
        log.warning(warning)
    shorten_lookups(module)
    return LoadedModel(module, tuple(opened.suppressed_tokens), opened.family.library)


def settle(module: Module, types: DtypePlan) -> None:
    """Converts the parameters of a module to their types, and evaluates the whole module."""
    # The parameters are still lazy results of `sanitize`, and nothing else holds the arrays that were read. So
    # evaluating a group of parameters frees the arrays from which they are made.
    waiting = [*parameters_of(module).items()][::-1]
    group: list[tuple[str, mx.array]] = []
    group_bytes = 0
    while waiting:
        name, array = waiting.pop()
        array = array.astype(types.dtype_of(name, array.dtype))
        group.append((name, array))
        group_bytes += array.nbytes
        if group_bytes >= _MADE_BYTES or not waiting:
            del array
            if types.dtype is not None:
                module.load_weights(group, strict=False)
            mx.eval([array for _, array in group])
            group, group_bytes = [], 0
    if types.dtype is not None and types.dtype == mx.float32:
        widen_embeddings(module)
    mx.eval(module.state)
    if device() == "cpu":
        use_huge_pages(parameters_of(module).values())


def _filled(opened: OpenedModel, recipe: Recipe, types: DtypePlan) -> Module:
    """Returns the module after all bytes are read. Parameters that are computed from them may still be lazy."""
    progress = Progress(log, "loading", opened.total_bytes)
    stacks, recipe = find_expert_stacks(opened, recipe)
    arrays: dict[str, Arrays] = {}
    with closing(ExpertReader()) as reader:
        for name, experts in stacks.items():
            arrays[name] = stack = reader.read_stack(experts)
            if early := types.early_dtype(name, experts[0]):
                arrays[name] = stack._replace(weight=stack.weight.astype(early))
                del stack
                mx.eval(arrays[name].weight)
            progress.add(sum(tensor.nbytes for tensor in experts))
    rest = opened._replace(tensors=outside_stacks(opened.tensors, stacks))
    arrays |= read_arrays(rest, types, progress)
    return assemble_module(opened, arrays, recipe)


def assemble_part(
    opened: OpenedModel, sanitize: Callable[[Weights], tuple[Part, Weights]], arrays: Mapping[str, Arrays]
) -> Part:
    """Returns a part made of `arrays`, which stay lazy. `sanitize` maps the stored weights to a fresh module and its
    weights. Raises ModelError if anything does not fit."""
    module, weights = sanitize_packed(lambda stored, _: sanitize(stored), arrays, Recipe("as stored"))
    fill(opened, module, weights)
    return cast("Part", module)


def plan_part(
    opened: OpenedModel, build: Builder[Part], dtype: str, budget_bytes: int | None
) -> tuple[Part, DtypePlan]:
    """Returns the part, made of placeholders, and the types of its weights. Raises ModelError if a tensor does not fit,
    or the weights exceed `budget_bytes`, the memory that is left."""
    rehearsed = build(placeholders(opened))
    return rehearsed, _fitting(rehearsed, dtype, budget_bytes)


def load_part(opened: OpenedModel, build: Builder[Part], name: str, dtype: str, budget_bytes: int | None) -> Part:
    """Loads a part as `load` loads a model. The log calls the part `name`."""
    return read_part(opened, build, name, plan_part(opened, build, dtype, budget_bytes)[1])


def read_part(opened: OpenedModel, build: Builder[Part], name: str, types: DtypePlan) -> Part:
    """Loads a part. `plan_part` must have returned `types`. Raises ReadError if reading fails."""
    try:
        check_readable(parts_of(opened))
        module = build(read_arrays(opened, types, Progress(log, f"loading {name}", opened.total_bytes)))
    except ModelError as error:
        raise ReadError(str(error)) from error
    settle(module, types)
    return module
