"""The functions of mlx-lm that contain a recurrence, computed by the kernel.

Each function here gets mlx-lm's own one first, which it calls where the device has no kernel. Its other parameters and
results are those of mlx-lm. States are float32. The decays of recurrences, with their steps or factors, are computed
together on CPUs: by one operation of our kernels, from floats of any type to float32.
"""

from collections.abc import Callable, Mapping
from functools import cache as cached
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu, softplus
from mlx_lm.models.activations import swiglu
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g
from mlx_lm.models.ssm import compute_dt

from runner.model.scans.kernel import Rule, available, cpu_kernel, on_cpu, scan
from runner.scan_calls import announced

_Results = tuple[mx.array, mx.array]
_Own = Callable[..., _Results]


def gated_delta_update(own: _Own, *inputs: mx.array, cache: Any = None, cache_index: int = 1, **words: Any) -> _Results:
    """With a `cache`, which only mlx-vlm gives, the state is read from it and replaced in it."""
    update: Callable[..., _Results] = partial(_gated_delta_update, own, *inputs, **words)
    if cache is None:
        return update()

    def updated(state: mx.array | None, steps: int | None) -> _Results:
        return update(state=state, **({} if steps is None else {"state_steps": steps}))

    results: _Results = cache.update_recurrent(cache_index, inputs[0].shape[1], updated)
    return results


@announced("state", "q k v a b mask")
def _gated_delta_update(
    own: _Own,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **words: float | None,
) -> _Results:
    """`words` are `use_kernel`, `lower_bound`, `allow_neg_eigval`, and `state_steps` in mlx-vlm's caches for drafts."""
    if not available(Rule.DELTA, metal=k.shape[-1] % 32 != 0) or words.get("state_steps") is not None:
        return own(q, k, v, a, b, A_log, dt_bias, state, mask, **words)
    bound, negative = words.get("lower_bound"), bool(words.get("allow_neg_eigval"))
    g, beta = delta_gates(a, b, A_log, dt_bias, bound, negative=negative)
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]))
    return scan(Rule.DELTA, (q, k, v, g, beta), state, mask, q.dtype)


@announced("state", "hidden_states B C dt mask")
def ssm_update(
    own: _Own,
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> _Results:
    if not available(Rule.DECAY, metal=False):
        return own(hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)
    x, length = hidden_states, hidden_states.shape[1]
    g, dt = step_gates(dt, dt_bias, A_log, time_step_limit)
    if lengths is not None:
        within = mx.arange(length) < lengths[:, None]
        mask = within if mask is None else mask & within
    if state is None:
        state = mx.zeros((x.shape[0], *x.shape[2:], B.shape[-1]))
    return scan(Rule.DECAY, (C, B, x, g, dt, D), state, mask, mx.result_type(x, D))


@announced("h", "q k v", axis=2)
def recurrent_gla(
    own: _Own,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    scale: float,
    h: mx.array | None = None,
    mask: mx.array | None = None,
    **words: int,
) -> _Results:
    """Inputs and outputs are [B, H, T, width], and the state [B, H, Dk, Dv] is ours transposed."""
    if not available(Rule.DECAY):
        return own(q, k, v, g, scale=scale, h=h, **({} if mask is None else {"mask": mask}), **words)
    batch, heads, length, width = q.shape
    state = mx.zeros((batch, heads, v.shape[-1], width)) if h is None else h.swapaxes(-1, -2)
    gates = mx.broadcast_to(mx.exp(g.astype(mx.float32)), (batch, length, heads))
    inputs = (*(each.swapaxes(1, 2) for each in (q * scale, k, v)), gates, mx.broadcast_to(1.0, gates.shape))
    y, state = scan(Rule.DECAY, (*inputs, mx.broadcast_to(0.0, (heads,))), state, mask, q.dtype)
    return y.swapaxes(1, 2), state.swapaxes(-1, -2)


@announced("h0", "x a")
def rnn_scan(own: _Own, x: mx.array, a: mx.array, h0: mx.array | None) -> _Results:
    if not available(Rule.LINEAR):
        return own(x, a, h0)
    return scan(Rule.LINEAR, (x, a), mx.zeros((x.shape[0], x.shape[-1])) if h0 is None else h0)


@announced("state", "r w k v a b")
def wkv7(
    own: _Own,
    self: Any,
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array | None,
) -> _Results:
    if not available(Rule.WKV, metal=False):
        return own(self, r, w, k, v, a, b, state)
    if state is None:
        state = mx.zeros((r.shape[0], self.num_heads, self.head_dim, self.head_dim))
    return scan(Rule.WKV, (r, w, k, v, a, b), state, None, r.dtype)


def process_sequence(
    own: Callable[..., tuple[mx.array, _Results]],
    self: Any,
    x: mx.array,
    window: mx.array | None,
    state: mx.array | None,
) -> tuple[mx.array, _Results]:
    """The mixers of Mamba and Jamba, for all tokens together."""
    if not available(Rule.SELECTIVE):
        return own(self, x, window, state)
    x, z = mx.split(self.in_proj(x), 2, axis=-1)
    kept = self.conv_kernel_size - 1
    rows = mx.pad(x, [(0, 0), (kept, 0), (0, 0)]) if window is None else mx.concatenate([window, x], axis=1)
    x = silu(self.conv1d(rows))
    rank, width = self.time_step_rank, self.ssm_state_size
    dt, B, C = mx.split(self.x_proj(x), [rank, rank + width], axis=-1)
    if "dt_layernorm" in self:
        dt, B, C = self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
    elif self.use_bcdt_rms:
        dt, B, C = (mx.fast.rms_norm(part, None, self.args.mixer_rms_eps) for part in (dt, B, C))
    A = -mx.exp(self.A_log)
    y, state = _selective(x, softplus(self.dt_proj(dt)), A, B, C, self.D, state)
    return self.out_proj(swiglu(z, y)), (rows[:, -kept:], state)


@announced("state", "x dt B C")
def _selective(
    x: mx.array, dt: mx.array, A: mx.array, B: mx.array, C: mx.array, D: mx.array, state: mx.array | None
) -> _Results:
    if state is None:
        state = mx.zeros((x.shape[0], *A.shape))
    return scan(Rule.SELECTIVE, (x, dt, A, B, C, D), state)


def delta_gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None, *, negative: bool
) -> _Results:
    """Returns the decays g and the factors beta of `gated_delta_update`. Eigenvalues may be `negative`: then beta is
    in [0, 2] instead of [0, 1]."""
    limits = (-mx.inf, mx.inf, lower_bound or 0.0, 2.0 if negative else 1.0)
    if lower_bound != 0 and (found := _computed(a, dt_bias, A_log, limits, b)):
        return found
    g = compute_g(A_log, a, dt_bias) if lower_bound is None else compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    return g, mx.sigmoid(b) * limits[-1]


def step_gates(dt: mx.array, dt_bias: mx.array, A_log: mx.array, limits: tuple[float, float]) -> _Results:
    """Returns the decays and the steps of `ssm_update`, whose steps have these `limits`."""
    if found := _computed(dt, dt_bias, A_log, (*limits, 0.0, 1.0)):
        return found
    dt = compute_dt(dt, dt_bias, limits)
    return mx.exp(dt * -mx.exp(A_log.astype(mx.float32))), dt


def _computed(
    x: mx.array, bias: mx.array, logarithms: mx.array, limits: tuple[float, ...], *other: mx.array
) -> _Results | None:
    """Returns the results of the kernel; None if the device has none, or none for these shapes."""
    fits = x.size > 0 and bias.shape == x.shape[2:] and logarithms.size == x.shape[2]
    kernel = cpu_kernel("gates") if fits and on_cpu() else None
    if kernel is None:
        return None
    decays, beside = kernel(
        inputs=[x, bias, logarithms, constants(*limits), *other],
        output_shapes=[x.shape, (other[0] if other else x).shape],
        output_dtypes=[mx.float32] * 2,
    )
    return decays, beside


@cached
def constants(*given: float) -> mx.array:
    """Returns an array of these numbers: the same one each time, which no graph has to compute."""
    return mx.array(given)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "gated_delta_update": gated_delta_update,
    "recurrent_gla": recurrent_gla,
    "rnn_scan": rnn_scan,
    "ssm_update": ssm_update,
}
"""By the name in mlx-lm's modules."""
METHODS: Mapping[str, Callable[..., Any]] = {"_process_sequence": process_sequence, "_wkv7": wkv7}
"""By the name in mlx-lm's classes."""
