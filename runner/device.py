"""The device that models run on: its kind, the memory that it has left, and attention on NVIDIA GPUs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

_CONTROL_GROUPS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's own limit: control groups version 2 and version 1."""
_MOST_SCORES = 1 << 25
"""The scores of all heads, 64 MB. Beyond it cuDNN's plan is a small part of the work."""
_attention = mx.fast.scaled_dot_product_attention


def device() -> Literal["cpu", "gpu"]:
    """Returns the kind of device on which models run in this process."""
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"


def usable_bytes() -> int:
    """Returns the bytes that a process may use: on a CPU `available_bytes`, on a GPU `gpu_usable_bytes`."""
    if device() == "cpu":
        return available_bytes()
    return gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())


def gpu_usable_bytes(info: Mapping[str, str | int], limit_bytes: int) -> int:
    """Returns Metal's recommended size, else the GPU's memory, else MLX's limit. `info` is from `mx.device_info`."""
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or limit_bytes)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can be used without swapping: Linux's `MemAvailable`, within the container's limit, or all
    physical memory on systems without these files. `root` is the root of the file system."""
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
    """Computes mx.fast.scaled_dot_product_attention, up to rounding, by plain products.

    On NVIDIA GPUs, MLX computes the attention of several 16-bit queries with cuDNN, which makes a plan for each shape:
    50 to 75 ms on an H200, on which the attention itself takes 0.2 ms. Each round of drafts and each prompt has another
    number of keys. Plain products need no plans, and memory for the scores only.
    """
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    if queries == 1 or batch * heads * queries * keys > _MOST_SCORES or rest:
        return _attention(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
    scores = (q * scale).reshape(batch, groups, -1, width) @ k.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, queries, keys)
    if isinstance(mask, str):  # "causal": the last query sees all keys
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
    """Puts `attention` before MLX's own, for all models of this process."""
    mx.fast.scaled_dot_product_attention = attention
