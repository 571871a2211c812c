"""Attention of one query over some columns of a buffer, on NVIDIA GPUs, where MLX's own knows no mask for one query.

A warp reads a 64th of the buffer, at least 32 columns, for one query. It leaves a sum of values, with the sum of their
weights and the largest score. A second kernel joins these sums.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

_WARP, _WARPS = 32, 4
_SPAN = "columns < 2048 ? 32 : (columns + 63) / 64"
_ATTEND = f"""
const int lane = int(threadIdx.x), place = int(blockIdx.y * blockDim.y + threadIdx.y), text = int(blockIdx.z);
const int columns = k_shape[2], span = {_SPAN}, spans = (columns + span - 1) / span;
const bool live = place < HEADS * spans;
const int head = live ? place / spans : 0, begin = live ? place % spans * span : 0;
const int end = begin + span < seen[text] ? begin + span : seen[text];
const auto query = q + text * q_strides[0] + head * q_strides[1];
const auto keys = k + text * k_strides[0] + head / SHARED * k_strides[1];
const auto values = v + text * v_strides[0] + head / SHARED * v_strides[1];
float own[KEYS], sum[VALUES] = {{}}, top = -3.0e38f, weight = 0;
for (int i = 0; i < KEYS; ++i)
  own[i] = lane * KEYS + i < D ? float(query[(lane * KEYS + i) * q_strides[3]]) * scale[0] : 0.0f;
for (int n = begin; n < end; ++n) {{
  const int column = (first[text] + n) % columns;
  float score = 0;
  for (int i = 0; i < KEYS; ++i)
    if (lane * KEYS + i < D) score += own[i] * float(keys[column * k_strides[2] + (lane * KEYS + i) * k_strides[3]]);
  for (int far = 16; far; far /= 2) score += __shfl_xor_sync(0xffffffffu, score, far);
  const float now = score > top ? score : top, kept = expf(top - now), added = expf(score - now);
  top = now;
  weight = weight * kept + added;
  for (int i = 0; i < VALUES; ++i)
    if (lane * VALUES + i < DV)
      sum[i] = sum[i] * kept + added * float(values[column * v_strides[2] + (lane * VALUES + i) * v_strides[3]]);
}}
if (live) {{
  const auto part = parts + (int64_t(text) * HEADS * spans + place) * (DV + 2);
  for (int i = 0; i < VALUES; ++i)
    if (lane * VALUES + i < DV) part[lane * VALUES + i] = sum[i];
  if (lane == 0) part[DV] = top, part[DV + 1] = weight;
}}
"""
_JOIN = """
const int lane = int(threadIdx.x), head = int(blockIdx.y * blockDim.y + threadIdx.y), text = int(blockIdx.z);
const int spans = parts_shape[2];
if (head < HEADS) {
  const auto own = parts + (int64_t(text) * HEADS + head) * spans * (DV + 2);
  float top = SINKS ? float(sinks[head]) : -3.0e38f, weight = 0;
  for (int i = 0; i < spans; ++i) top = own[i * (DV + 2) + DV] > top ? own[i * (DV + 2) + DV] : top;
  if (SINKS) weight = expf(float(sinks[head]) - top);
  for (int i = 0; i < spans; ++i) weight += expf(own[i * (DV + 2) + DV] - top) * own[i * (DV + 2) + DV + 1];
  for (int at = lane; at < DV; at += 32) {
    float sum = 0;
    for (int i = 0; i < spans; ++i) sum += expf(own[i * (DV + 2) + DV] - top) * own[i * (DV + 2) + at];
    y[(int64_t(text) * HEADS + head) * DV + at] = static_cast<Y>(sum / weight);
  }
}
"""


@cache
def _kernels() -> tuple[Callable[..., list[mx.array]], Callable[..., list[mx.array]]]:
    make: Any = mx.fast.cuda_kernel
    inputs = ["q", "k", "v", "first", "seen", "scale"]
    return (
        make("runner_attend", inputs, ["parts"], _ATTEND, ensure_row_contiguous=False),
        make("runner_attend_join", ["parts", "sinks"], ["y"], _JOIN, ensure_row_contiguous=False),
    )


def needs_kernel(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Returns True on an NVIDIA GPU, for arrays that the kernel can read."""
    return mx.default_device() == mx.gpu and not mx.metal.is_available() and q.dtype == k.dtype == v.dtype


def attend_columns(
    q: mx.array, k: mx.array, v: mx.array, first: mx.array, seen: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Returns the attention [B, H, 1, DV] of the queries [B, H, 1, D] over the columns of each row from `first` on, as
    many as `seen` says (both int [B]), modulo the number of columns of the keys and values."""
    rows, heads, _, width = q.shape
    columns, out = k.shape[2], v.shape[3]
    span = 32 if columns < 2048 else (columns + 63) // 64
    spans = -(-columns // span)
    attend, join = _kernels()
    sizes = {"HEADS": heads, "SHARED": heads // k.shape[1], "D": width, "DV": out}
    lanes = {"KEYS": -(-width // _WARP), "VALUES": -(-out // _WARP)}
    sink_type = [] if sinks is None else [("S", sinks.dtype)]
    (parts,) = attend(
        inputs=[q, k, v, first, seen, mx.array([scale], mx.float32)],
        template=[*sizes.items(), *lanes.items(), ("T", q.dtype)],
        grid=(_WARP, -(-heads * spans // _WARPS) * _WARPS, rows),
        threadgroup=(_WARP, _WARPS, 1),
        output_shapes=[(rows, heads, spans, out + 2)],
        output_dtypes=[mx.float32],
    )
    return join(
        inputs=[parts, mx.zeros((1,)) if sinks is None else sinks],
        template=[("HEADS", heads), ("DV", out), ("SINKS", int(sinks is not None)), ("Y", q.dtype), *sink_type],
        grid=(_WARP, -(-heads // _WARPS) * _WARPS, rows),
        threadgroup=(_WARP, _WARPS, 1),
        output_shapes=[(rows, heads, 1, out)],
        output_dtypes=[q.dtype],
    )[0]
