"""The kernel of recurrences: a state S for each text and head, and one update of it for each token."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import mlx.core as mx


class Rule(Enum):
    """The rules of updates. A value is the names of the inputs.

    A state has `Dv` rows of `Dk` columns, in float32. B texts have T tokens each. Of a token, `k`, `q` and whatever
    else has `Dk` columns are vectors [Dk], and `v` is a vector [Dv]. H heads of values may share the vectors of fewer
    heads of keys.
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

    @property
    def values(self) -> int:
        """The index of the input that has the shape of the outputs."""
        names = self.value.split()
        return names.index("v" if "v" in names else "x")


_Kernel = Callable[..., Sequence[mx.array]]
_made: dict[tuple[Rule, bool], _Kernel] = {}


def available(rule: Rule, *, masked: bool = False) -> bool:
    """Returns True if the device has a kernel for `rule`."""
    return _kernel(rule, masked) is not None


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
    arrays = [*inputs, state] if state.dtype == mx.float32 else [*inputs, state.astype(mx.float32)]
    kernel = _kernel(rule, mask is not None)
    if kernel is None:
        raise RuntimeError(f"this device has no kernel for {rule.name}")
    y, after = kernel(
        inputs=arrays if mask is None else [*arrays, mask],
        output_shapes=[values.shape, state.shape],
        output_dtypes=[dtype or values.dtype, mx.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return y, after


def _kernel(rule: Rule, masked: bool) -> _Kernel | None:
    """Returns the kernel for `rule`; None if the device has none. On a CPU it is one of `runner.cpu`, which stands in
    front of MLX's function and needs no source."""
    if (rule, masked) not in _made:
        if mx.default_device() != mx.Device(mx.cpu):
            return None
        names = [*rule.value.split(), "state", *["mask"] * masked]
        try:
            made: Any = mx.fast.cuda_kernel(f"runner_scan_{rule.name.lower()}", names, ["y", "after"], "")
        except RuntimeError:
            return None
        _made[rule, masked] = made
    return _made[rule, masked]
