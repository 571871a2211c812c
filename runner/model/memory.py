"""How much memory this machine has left for a model."""

import os
from pathlib import Path

_CONTROL_GROUPS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container finds its own limit: version 2 and version 1."""


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
