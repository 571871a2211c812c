"""How much memory this machine has left for a model."""

import os
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

_CONTROL_GROUPS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container finds its own limit: version 2 and version 1."""


def usable_bytes() -> int:
    """What the device lends to a process: on a CPU what the machine has left, on a GPU what is recommended or there."""
    if mx.default_device() == mx.Device(mx.cpu):
        return available_bytes()
    return gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())


def gpu_usable_bytes(info: Mapping[str, str | int], limit_bytes: int) -> int:
    """What Metal recommends, what a GPU has, else MLX's own limit: of `info`, which MLX gives."""
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or limit_bytes)


def available_bytes(root: Path = Path("/")) -> int:
    """What can be had without swapping: what Linux calls available, and no more than a container may have.

    Where the system does not tell, all the memory that is built in. `root` is where the files of the system lie.
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
