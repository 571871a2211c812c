"""Chooses the type in which a model computes: its own, or a type to which loading converts its weights.

MLX's CPU backend computes 16-bit numbers one by one, but float32 numbers with a BLAS and vector instructions. So on a
CPU all weights become float32 if memory allows: plain weights, norms, and the scales and biases of packed weights. A
packed layer computes in the type of its scales. Keys and values in a cache have the type of the layer that makes them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from runner.device import available_bytes, device
from runner.logs import Log
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.weights.parameters import parameters_of
from runner.settings import CACHE_PERCENT
from runner.sizes import sized

log = Log(__name__)
Forward = Callable[[mx.array, list[object]], mx.array]

_TYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_HALVES = (mx.bfloat16, mx.float16)
_FACTOR = "global_scale"
"""The parameter by which some packed layers multiply their outputs in float32 (`quantized_layers.py`)."""


class DtypePlan(NamedTuple):
    """The types of one model's floating-point weights.

    Loading converts weights to `dtype`, unless it is None. `computes` is the name of the type that most weights then
    have. `why` is the reason for the choice, and `lacking` the reason against a better type, if there is one.
    """

    dtype: mx.Dtype | None
    computes: str
    why: str
    lacking: str = ""
    may_shrink: Callable[[str], bool] = lambda _: True
    """Returns True if the parameter with this name may lose precision."""

    def dtype_of(self, name: str, dtype: mx.Dtype) -> mx.Dtype:
        """Returns the type that the parameter `name`, stored as `dtype`, has in memory."""
        if self.dtype is None or not mx.issubdtype(dtype, mx.floating):
            return dtype
        return self.dtype if self.dtype == mx.float32 or self.may_shrink(name) else dtype

    def early_dtype(self, name: str, tensor: LogicalTensor) -> mx.Dtype | None:
        """Returns the type to which a tensor is converted right after reading, or None if it is converted later, in the
        module. Early conversion saves memory for large weights that shrink."""
        if self.dtype is None or self.dtype == mx.float32:
            return None
        is_wide = tensor.weight.dtype == "F32" and len(tensor.weight.shape) > 1
        return self.dtype if is_wide and name.endswith(".weight") and self.may_shrink(name) else None

    def nbytes(self, module: Module) -> int:
        """Returns the bytes of the module's parameters after conversion. The parameters may be placeholders."""
        parameters = parameters_of(module).items()
        return sum(array.size * self.dtype_of(name, array.dtype).size for name, array in parameters)

    def over_budget(self, budget_bytes: int | None, module: Module) -> str:
        """Returns the reason why the weights of `module` do not fit into `budget_bytes`; empty if they fit."""
        if budget_bytes is None or (needed := self.nbytes(module)) <= budget_bytes:
            return ""
        return (
            f"the weights take {sized(needed)} in {self.computes}, and the runner may use {sized(budget_bytes)} in all:"
            " choose a smaller or a quantized model, free memory, or allow more with --memory"
        )

    def log_choice(self) -> None:
        """Logs `computes` and `why`, and `lacking` as a warning."""
        if self.lacking:
            log.warning(self.lacking)
        log.info("number format", dtype=self.computes, why=self.why)


def plan_dtypes(wanted: str, module: Module, budget_bytes: int | None = None) -> DtypePlan:
    """Returns the types that `--dtype wanted` means for `module`. Its parameters may be placeholders. `budget_bytes` is
    the limit for weights, caches and computing together; None stands for all available memory."""
    parameters = [*parameters_of(module).items()]
    own = _most(parameters)
    if wanted in _TYPES:
        why = _converted(own, wanted, "--dtype asks for it")
        return DtypePlan(_TYPES[wanted], wanted, why, may_shrink=_may_shrink(module))
    kept = DtypePlan(None, _name(own), "the model's own type")
    if wanted == "keep":
        return kept
    halves = any(array.dtype in _HALVES for _, array in parameters)
    if device() == "gpu":
        return kept._replace(why="the model's own type, in which a GPU is fast") if halves else kept
    if not halves:
        return kept._replace(dtype=mx.float32)
    found_bytes = available_bytes() if budget_bytes is None else budget_bytes
    converting = DtypePlan(
        mx.float32, "float32", _converted(own, "float32", "a CPU is many times slower with 16-bit numbers")
    )
    wanted_bytes = converting.nbytes(module) * 100 // (100 - CACHE_PERCENT)
    if wanted_bytes <= found_bytes:
        return converting
    lacking = (
        f"weights stay {_name(own)}, in which a CPU is many times slower and cannot run experts: float32 needs"
        f" {sized(wanted_bytes)} of memory, including a share for the cache, but only {sized(found_bytes)} may be used;"
        " --dtype float32 converts them anyway"
    )
    return kept._replace(why="too little memory for float32", lacking=lacking)


def _most(parameters: list[tuple[str, mx.array]]) -> mx.Dtype:
    """Returns the floating-point type that most numbers of the parameters have."""
    counts = Counter[mx.Dtype]()
    for _, array in parameters:
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] += array.size
    return max(counts, key=counts.__getitem__, default=mx.float32)


def _may_shrink(module: Module) -> Callable[[str], bool]:
    """Returns the rule of mlx-lm's conversions: a test of a parameter's name, True if it may lose precision."""
    predicate = cast("Callable[[str], bool]", getattr(module, "cast_predicate", lambda _: True))
    return lambda name: not name.endswith(_FACTOR) and predicate(name)


def _converted(own: mx.Dtype, dtype: str, why: str) -> str:
    return why if _name(own) == dtype else f"converted from {_name(own)}: {why}"


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


_HEADS: dict[type[Module], str] = {Linear: "__call__", Embedding: "as_linear"}
"""Class of a head that is not quantized -> its method that maps hidden states to logits."""


def in_float32(module: Module, forward: Forward, tokens: Sequence[int]) -> Forward:
    """Returns a `forward` that computes the logits of the candidates `tokens` at the last position in float32, as
    Ollama's runner does for scores. Returns `forward` itself unless `module` is a Qwen 3.5 whose head is not
    quantized."""
    text = getattr(module, "language_model", None)
    if not isinstance(text, Module) or not type(text).__module__.endswith(".qwen3_5"):
        return forward
    head = text.get("lm_head", text["model"]["embed_tokens"])
    plain, wanted = type(head), mx.array([*tokens])
    if plain not in _HEADS:
        return forward
    logits_of = getattr(plain, _HEADS[plain])

    def precise(head: Module, hidden: mx.array) -> mx.array:
        logits: mx.array = logits_of(head, hidden).astype(mx.float32)
        logits[:, -1, wanted] = hidden[:, -1].astype(mx.float32) @ head["weight"][wanted].T
        return logits

    changed = type(plain.__name__, (plain,), {_HEADS[plain]: precise})

    def scored(tokens: mx.array, layers: list[object]) -> mx.array:
        head.__class__ = changed
        try:
            return forward(tokens, layers)
        finally:
            head.__class__ = plain

    return scored
