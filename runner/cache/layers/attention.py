"""Attention of one query over some columns of a buffer, on NVIDIA GPUs: MLX's own takes no mask there for one query.

The warps of a block take turns over the columns of a head, and join their sums. Over long buffers, several blocks share
a head; a second kernel joins their sums of values, with the sums of weights and the largest scores.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

_WARPS = 16
_ALONE, _SHARE, _MOST = 1_024, 512, 32
"""The most columns of a block that has a head to itself; the columns for each of several blocks; the most blocks."""
_ATTEND = """
const int lane = int(threadIdx.x), warp = int(threadIdx.y), head = int(blockIdx.x), text = int(blockIdx.z);
const int heads = int(gridDim.x), parts = int(gridDim.y), group = head / GROUPS, columns = k_shape[2];
const int part = (seen[text] + parts - 1) / parts, begin = int(blockIdx.y) * part;
const int end = begin + part < seen[text] ? begin + part : seen[text];
__shared__ float tops[WARPS], sums[WARPS], outs[WARPS][DV];
float query[PER], out[PER_V] = {};
#pragma unroll
for (int i = 0; i < PER; ++i) {
  const int at = lane * PER + i;
  query[i] = at < D ? float(q[text * q_strides[0] + head * q_strides[1] + at * q_strides[3]]) * scale[0] : 0.0f;
}
float top = -3.0e38f, sum = 0;
const auto keys = k + text * k_strides[0] + group * k_strides[1];
const auto values = v + text * v_strides[0] + group * v_strides[1];
for (int n = begin + warp; n < end; n += WARPS) {
  const int at = first[text] + n, column = at < columns ? at : at - columns;
  float score = 0;
  #pragma unroll
  for (int i = 0; i < PER; ++i)
    if (lane * PER + i < D) score += query[i] * float(keys[column * k_strides[2] + lane * PER + i]);
  #pragma unroll
  for (int far = 16; far; far /= 2) score += __shfl_xor_sync(0xffffffffu, score, far);
  const float now = score > top ? score : top, keep = expf(top - now), weight = expf(score - now);
  top = now;
  sum = sum * keep + weight;
  #pragma unroll
  for (int i = 0; i < PER_V; ++i)
    if (lane * PER_V + i < DV)
      out[i] = out[i] * keep + weight * float(values[column * v_strides[2] + lane * PER_V + i]);
}
if (lane == 0) { tops[warp] = top; sums[warp] = sum; }
#pragma unroll
for (int i = 0; i < PER_V; ++i)
  if (lane * PER_V + i < DV) outs[warp][lane * PER_V + i] = out[i];
__syncthreads();
for (int at = warp * 32 + lane; at < DV; at += WARPS * 32) {
  float most = tops[0], total = 0, mixed = 0;
  for (int i = 1; i < WARPS; ++i) most = tops[i] > most ? tops[i] : most;
  for (int i = 0; i < WARPS; ++i) {
    const float share = expf(tops[i] - most);
    total += share * sums[i];
    mixed += share * outs[i][at];
  }
  const int64_t place = (int64_t(text) * heads + head) * parts + int(blockIdx.y);
  if (!SPLIT) y[place * DV + at] = static_cast<Y>(mixed / total);
  else {
    y[place * (DV + 2) + at] = static_cast<Y>(mixed);
    if (at == 0) {
      y[place * (DV + 2) + DV] = static_cast<Y>(most);
      y[place * (DV + 2) + DV + 1] = static_cast<Y>(total);
    }
  }
}
"""
_JOIN = """
const int row = int(blockIdx.x), at = int(threadIdx.x), count = parts_shape[2];
float most = -3.0e38f, total = 0, mixed = 0;
for (int i = 0; i < count; ++i) most = fmaxf(most, parts[(row * count + i) * (DV + 2) + DV]);
for (int i = 0; i < count; ++i) {
  const auto part = parts + (row * count + i) * (DV + 2);
  const float share = expf(part[DV] - most);
  total += share * part[DV + 1];
  mixed += share * part[at];
}
y[row * DV + at] = static_cast<Y>(mixed / total);
"""


@cache
def _kernels() -> tuple[Callable[..., list[mx.array]], Callable[..., list[mx.array]]]:
    make: Any = mx.fast.cuda_kernel
    inputs = ["q", "k", "v", "first", "seen", "scale"]
    return (
        make("runner_attend", inputs, ["y"], _ATTEND, ensure_row_contiguous=False),
        make("runner_attend_join", ["parts"], ["y"], _JOIN, ensure_row_contiguous=False),
    )


def attend_columns(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    first: mx.array,
    seen: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Returns the attention [B, H, 1, DV] of the queries [B, H, 1, D]. Row b looks at `seen[b]` columns of the keys and
    values from `first[b]` on, and after the last column at the first one. Raises ValueError for sinks and for several
    types: MLX's own products would multiply what a mask hides by 0, and a NaN there would spread."""
    if sinks is not None or not q.dtype == k.dtype == v.dtype:
        raise ValueError("no kernel for attention with sinks or several types")
    rows, heads, _, width = q.shape
    columns, out = k.shape[2], v.shape[3]
    parts = 1 if columns <= _ALONE else min(_MOST, columns // _SHARE)
    attend, join = _kernels()
    # T is for MLX alone, which keeps a kernel by its name and template.
    lanes = {"PER": -(-width // 32), "PER_V": -(-out // 32), "WARPS": _WARPS, "GROUPS": heads // k.shape[1]}
    made = q.dtype if parts == 1 else mx.float32
    (y,) = attend(
        inputs=[q, k, v, first, seen, mx.array([scale], mx.float32)],
        template=[("D", width), ("DV", out), *lanes.items(), ("SPLIT", int(parts > 1)), ("T", q.dtype), ("Y", made)],
        grid=(32 * heads, _WARPS * parts, rows),
        threadgroup=(32, _WARPS, 1),
        output_shapes=[(rows, heads, 1, out) if parts == 1 else (rows, heads, parts, out + 2)],
        output_dtypes=[made],
    )
    if parts == 1:
        return y
    return join(
        inputs=[y],
        template=[("DV", out), ("Y", q.dtype)],
        grid=(rows * heads * out, 1, 1),
        threadgroup=(out, 1, 1),
        output_shapes=[(rows, heads, 1, out)],
        output_dtypes=[q.dtype],
    )[0]
