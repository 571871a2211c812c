"""Memory that this machine has left for a model."""

import os
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

_CONTROL_GROUPS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's own limit: control groups version 2 and version 1."""


def usable_bytes() -> int:
    """Returns the bytes that a process may use: on a CPU what the machine has left, on a GPU `gpu_usable_bytes`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return available_bytes()
    return gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())


def gpu_usable_bytes(info: Mapping[str, str | int], limit_bytes: int) -> int:
    """Returns Metal's recommended size, else the GPU's memory, else MLX's limit. `info` is from `mx.device_info`."""
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or limit_bytes)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can be used without swapping: Linux's `MemAvailable`, within the container's limit.

    Returns all physical memory on systems without these files. `root` is the root of the file system.
    """
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
