"""The device on which models run: its kind, its free memory, and attention on NVIDIA GPUs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

_CONTROL_GROUPS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The files with a container's memory limit, of control groups version 2 and version 1."""
_MOST_SCORES = 1 << 25
"""The most scores, over all heads (64 MB), for plain products: with more, cuDNN's plans hardly matter."""
_attention = mx.fast.scaled_dot_product_attention


def device() -> Literal["cpu", "gpu"]:
    """Returns the kind of device on which models run in this process."""
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"


def on_cuda() -> bool:
    """Returns True if models run on an NVIDIA GPU in this process."""
    return device() == "gpu" and not mx.metal.is_available()


def usable_bytes() -> int:
    """Returns the bytes that a process may use: `available_bytes` on a CPU, `gpu_usable_bytes` on a GPU."""
    if device() == "cpu":
        return available_bytes()
    return gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())


def gpu_usable_bytes(info: Mapping[str, str | int], limit_bytes: int) -> int:
    """Returns Metal's recommended size, else the GPU's memory, else `limit_bytes`. `info` is from `mx.device_info`."""
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or limit_bytes)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can be used without swapping: Linux's `MemAvailable` or the container's limit, if lower.
    On systems without these files, returns all physical memory. `root` is the root of the file system."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(int(value.removesuffix("kB")) << 10)
    limits = (_text(root / path).strip() for path in _CONTROL_GROUPS)
    return min(*found, *(int(limit) for limit in limits if limit.isdecimal()), found[0])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **rest: Any,
) -> mx.array:
    """Computes the same as mx.fast.scaled_dot_product_attention, up to rounding, by plain matrix products.

    On NVIDIA GPUs, MLX computes the attention of several 16-bit queries with cuDNN, which makes a plan for each shape.
    A plan takes 50 to 75 ms on an H200, the attention itself 0.2 ms. Each round of drafts and each prompt has another
    number of keys, so it needs another plan. Plain products need no plan, but memory for the scores.
    """
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    if queries == 1 or batch * heads * queries * keys > _MOST_SCORES or rest:
        return _attention(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
    scores = (q * scale).reshape(batch, groups, -1, width) @ k.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, queries, keys)
    if isinstance(mask, str):  # "causal": the last query attends to all keys
        mask = mx.arange(keys) <= mx.arange(keys - queries, keys)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        sinks = mx.broadcast_to(sinks[:, None, None], (batch, heads, queries, 1))
        scores = mx.concatenate([sinks, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights.reshape(batch, groups, -1, keys) @ v).reshape(batch, heads, queries, -1)


def use_on_cuda() -> None:
    """Replaces MLX's attention by `attention`, for all models of this process."""
    mx.fast.scaled_dot_product_attention = attention
