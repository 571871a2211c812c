"""The cores that prompts may be read on: physical ones, within the affinity mask and the quotas of cgroups."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.cpu import cores
from runner.cpu.cores import physical_cores

LINUX = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux tells the affinity mask")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two sockets of two cores with two hardware threads each, without quotas."""
    for cpu in range(8):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    (tmp_path / "group").mkdir()
    (tmp_path / "own").write_text("0::/outer/inner\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path / "group")
    monkeypatch.setattr(cores, "_OWN_CGROUP", tmp_path / "own")
    return tmp_path


def allow(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))


@LINUX
@pytest.mark.parametrize(
    ("cpus", "counted"), [(range(8), 4), ((0, 4), 1), ((0, 1, 2), 3), ((5,), 1), ((0, 90, 91), 3)], ids=str
)
def test_hardware_threads_of_one_core_count_once(
    cpus: tuple[int, ...], counted: int, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors without a description count as cores of their own."""
    allow(monkeypatch, *cpus)
    assert physical_cores() == counted


@LINUX
@pytest.mark.parametrize(
    ("quotas", "counted"),
    [
        ({"outer/inner": "250000 100000"}, 2),
        ({"outer": "100000 100000", "outer/inner": "max 100000"}, 1),
        ({"outer/inner": "50000 100000"}, 1),
        ({"": "900000 100000"}, 4),
        ({"outer/inner": "nonsense"}, 4),
    ],
    ids=str,
)
def test_a_quota_of_any_cgroup_around_the_process_counts(
    quotas: Mapping[str, str], counted: int, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, *range(8))
    for name, quota in quotas.items():
        directory = machine / "group" / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cpu.max").write_text(f"{quota}\n")
    assert physical_cores() == counted


@LINUX
def test_a_system_without_cgroups_of_version_2_has_no_quota(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, *range(8))
    (machine / "own").write_text("4:cpu:/docker\n")
    assert physical_cores() == 4


def test_other_systems_count_what_python_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert physical_cores() == 1
