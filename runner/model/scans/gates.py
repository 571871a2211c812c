"""The decays of recurrences, with their steps or factors. On CPUs one operation of our kernels computes both, from
floats of any type to float32; elsewhere mlx-lm's functions do."""

from functools import cache

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g
from mlx_lm.models.ssm import compute_dt

from runner.model.scans.kernel import cpu_kernel, on_cpu

Gates = tuple[mx.array, mx.array]


def delta_gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None, *, negative: bool
) -> Gates:
    """Returns the decays g and the factors beta of `gated_delta_update`. Eigenvalues may be `negative`: then beta is
    in [0, 2] instead of [0, 1]."""
    limits = (-mx.inf, mx.inf, lower_bound or 0.0, 2.0 if negative else 1.0)
    if lower_bound != 0 and (found := _computed(a, dt_bias, A_log, limits, b)):
        return found
    g = compute_g(A_log, a, dt_bias) if lower_bound is None else compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    return g, mx.sigmoid(b) * limits[-1]


def step_gates(dt: mx.array, dt_bias: mx.array, A_log: mx.array, limits: tuple[float, float]) -> Gates:
    """Returns the decays and the steps of `ssm_update`, whose steps have these `limits`."""
    if found := _computed(dt, dt_bias, A_log, (*limits, 0.0, 1.0)):
        return found
    dt = compute_dt(dt, dt_bias, limits)
    return mx.exp(dt * -mx.exp(A_log.astype(mx.float32))), dt


def _computed(
    x: mx.array, bias: mx.array, logarithms: mx.array, limits: tuple[float, ...], *other: mx.array
) -> Gates | None:
    """Returns the results of the kernel; None if the device has none, or none for these shapes."""
    fits = x.size > 0 and bias.shape == x.shape[2:] and logarithms.size == x.shape[2]
    kernel = cpu_kernel("gates") if fits and on_cpu() else None
    if kernel is None:
        return None
    decays, beside = kernel(
        inputs=[x, bias, logarithms, _numbers(*limits), *other],
        output_shapes=[x.shape, (other[0] if other else x).shape],
        output_dtypes=[mx.float32] * 2,
    )
    return decays, beside


@cache
def _numbers(*numbers: float) -> mx.array:
    return mx.array(numbers)
