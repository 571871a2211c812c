"""Counts the processor cores that this process may use."""

import os
from collections.abc import Iterator
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MOST = 32
"""The most cores that are counted. Few products can be divided among more threads."""


def physical_cores() -> int:
    """Returns the number of physical cores, from 1 to 32, that the affinity mask and the cgroups' quotas allow. A
    core's second hardware thread is not counted: it uses the same vector units, and speeds up no product."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = {_core(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), *(int(quota) for quota in _quotas()), _MOST))


def _core(cpu: int) -> tuple[str, ...]:
    topology = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return tuple((topology / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (str(cpu),)


def _quotas() -> Iterator[float]:
    """Yields the number of processors that each cgroup (version 2) of this process allows, if it has a limit."""
    try:
        own = next(line for line in _OWN_CGROUP.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return
    directory = _CGROUPS / own.removeprefix("0::/")
    for each in (directory, *directory.parents):
        if not each.is_relative_to(_CGROUPS):
            return
        try:
            quota, period = (each / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            yield int(quota) / int(period)
