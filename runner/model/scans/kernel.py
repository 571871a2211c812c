"""The kernel of recurrences: a state S for each text and head, and one update of it for each token."""

from collections.abc import Sequence
from enum import Enum
from functools import cache, partial
from typing import Any

import mlx.core as mx

from runner.model.scans import gpu

_CPU = mx.Device(mx.cpu)


class Rule(Enum):
    """The rules of updates. A value is the names of the inputs.

    A state has `Dv` rows of `Dk` columns, in float32. B texts have T tokens each. For each token `v` is a vector [Dv];
    `k`, `q` and the other inputs along columns are vectors [Dk]. H heads of values may share the vectors of fewer heads
    of keys.
    """

    DECAY = "q k v g beta skip"
    """S = g S + beta v k^T; y = S q + skip v. `g` and `beta` are [B, T, H], `skip` is [H]."""
    DELTA = "q k v g beta"
    """S = g S; S = S + beta (v - S k) k^T; y = S q. `g` is [B, T, H], or [B, T, H, Dk] for a factor of each column."""
    WKV = "r w k v a b"
    """S = S w + v k^T + (S a) b^T, of which each S is the one before the token; y = S r. `w` is [B, T, H, Dk]."""
    SELECTIVE = "x dt A B C D"
    """S = exp(dt A) S + dt x B^T; y = S C + D x. The state is [B, Dv, Dk]: `x` and `dt` are [B, T, Dv], `A` is
    [Dv, Dk], `B` and `C` are [B, T, Dk], `D` is [Dv]."""
    LINEAR = "x a"
    """s = a s + x; y = s. The state is [B, D], and `x` and `a` are [B, T, D]."""

    def __init__(self, names: str) -> None:
        self.inputs: Sequence[str] = tuple(names.split())
        self.values = self.inputs.index("v" if "v" in self.inputs else "x")
        """The index of the input that has the shape of the outputs."""
        self.kernel = f"scan_{self._name_.lower()}"
        """The name of the kernel for CPUs."""


def available(rule: Rule, *, metal: bool = True) -> bool:
    """Returns True if the device has a kernel for `rule`. `metal` is False if mlx-lm has one of its own for Macs."""
    if on_cpu():
        return cpu_kernel(rule.kernel) is not None
    return metal or not mx.metal.is_available()


def scan(
    rule: Rule,
    inputs: Sequence[mx.array],
    state: mx.array,
    mask: mx.array | None = None,
    dtype: mx.Dtype | None = None,
) -> tuple[mx.array, mx.array]:
    """Returns the outputs [B, T, ...], in `dtype` or in that of the values, and the state after the last token.

    `inputs` are those of `rule`, in floats of any type; `state` is the one before the first token. Tokens that are
    False in `mask` [B, T] change no state, and their output is 0. Raises RuntimeError unless the kernel is `available`.
    """
    values = inputs[rule.values]
    if values.size == 0:
        return values, state
    arrays = [*inputs, state.astype(mx.float32), *(() if mask is None else (mask,))]
    dtype = dtype or values.dtype
    if on_cpu():
        kernel = cpu_kernel(rule.kernel)
    else:
        names = (*rule.inputs, "state", "mask")[: len(arrays)]
        shapes, kinds = zip(*((array.shape, array.dtype) for array in arrays), strict=True)
        kernel = gpu.prepared(rule.name, names, shapes, kinds, dtype)
    if kernel is None:
        raise RuntimeError(f"this device has no kernel for {rule.name}")
    like = {"output_shapes": [values.shape, state.shape], "output_dtypes": [dtype, mx.float32]}
    y, after = kernel(inputs=arrays, **like)
    return y, after


def on_cpu() -> bool:
    """Returns True if this process computes on the CPU."""
    return mx.default_device() == _CPU


def cpu_kernel(name: str) -> gpu.Kernel | None:
    """Returns a kernel of `runner.cpu`, or None if these are not in front of MLX. It needs no source, and is called as
    MLX's own kernels are."""
    try:
        return _made(name)
    except RuntimeError:
        return None


@cache
def _made(name: str) -> gpu.Kernel:
    kernel: Any = mx.fast.cuda_kernel(f"runner_{name}", [], [], "")
    return partial(kernel, grid=(1, 1, 1), threadgroup=(1, 1, 1))
