"""The host's own libraries are kept away from ours."""

import _thread
import errno
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from runner.errors import RunnerError
from runner.process.limits import check_threads
from runner.process.parent import was_adopted, without_host_libraries


def test_the_hosts_library_directories_are_dropped_and_others_stay(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "ollama"
    (library / "mlx_cuda_v13" / "include").mkdir(parents=True)
    other = tmp_path / "mine"
    other.mkdir()
    path = os.pathsep.join([str(library), str(library / "mlx_cuda_v13"), str(other)])
    cuda = str(library / "mlx_cuda_v13")
    cleaned = without_host_libraries({"LD_LIBRARY_PATH": path, "CUDA_PATH": cuda, "CUDA_HOME": cuda, "HOME": "/h"})
    assert cleaned == {"LD_LIBRARY_PATH": str(other), "HOME": "/h"}


@pytest.mark.parametrize("library", ["libmlx.dylib", "libmlxc.so.1"])
def test_a_directory_with_an_mlx_of_its_own_is_dropped_whatever_its_name(library: str, tmp_path: Path) -> None:
    (tmp_path / library).touch()
    assert without_host_libraries({"LD_LIBRARY_PATH": str(tmp_path)}) == {}


def test_another_library_of_a_similar_name_is_no_mlx(tmp_path: Path) -> None:
    (tmp_path / "libmlx5.so.1").touch()  # a network driver
    (tmp_path / "mlx_notes").touch()
    assert without_host_libraries({"LD_LIBRARY_PATH": str(tmp_path)}) == {"LD_LIBRARY_PATH": str(tmp_path)}


@pytest.mark.parametrize("entry", ["/gone/lib//./ollama/.", "lib/ollama"])
def test_a_hosts_library_directory_is_known_by_its_name_even_if_it_is_not_there(entry: str) -> None:
    assert without_host_libraries({"LD_LIBRARY_PATH": f"/gone{os.pathsep}{entry}"}) == {"LD_LIBRARY_PATH": "/gone"}


def test_threads_that_can_be_started_end_again() -> None:
    before = _thread._count()
    check_threads(20)
    until = time.monotonic() + 30
    while _thread._count() > before:
        assert time.monotonic() < until
        time.sleep(0.001)


PROCESSES = r"raise the limit on processes and threads \(`ulimit -u` is \w+; .* pids\)"
STACKS = r"there is no address space for their stacks: raise the limit on it \(`ulimit -v` is \w+; .* is \w+\)"


@pytest.mark.parametrize("most", [0, 3, 19])
@pytest.mark.parametrize("advice", [PROCESSES, STACKS])
def test_too_few_threads_are_told_with_the_limit_to_look_at(
    most: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if advice == STACKS:
        monkeypatch.setattr("mmap.mmap", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
    genuine = _thread.start_new_thread
    started: list[int] = []

    def start_new_thread(*arguments: Any) -> int:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(genuine(*arguments))
        return started[-1]

    monkeypatch.setattr(_thread, "start_new_thread", start_new_thread)
    with pytest.raises(RunnerError, match=f"^cannot start 20 threads, only {most}: {advice}$"):
        check_threads(20)


HOST, OWN, ADOPTER, SHELL = 70, 71, 1, 60
SESSIONS = {0: SHELL, OWN: SHELL, HOST: SHELL, ADOPTER: ADOPTER}
"""The session of each process: the host and its child are in that of a shell."""


@pytest.mark.parametrize(
    ("parent", "changes", "adopted"),
    [
        (HOST, {}, False),
        (ADOPTER, {}, True),
        (ADOPTER, {0: OWN, OWN: OWN}, False),  # a service, which leads a session of its own
        (ADOPTER, {0: ADOPTER, OWN: ADOPTER}, False),  # in a container, whose first process is the host
        (0, {}, False),  # the same, in a container that it was put into from outside
        (69, {}, False),  # a parent that has just ended
    ],
)
def test_a_parent_of_another_session_has_adopted_the_process(
    parent: int, changes: dict[int, int], adopted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getsid(process: int) -> int:
        sessions = SESSIONS | changes
        if process not in sessions:
            raise ProcessLookupError
        return sessions[process]

    monkeypatch.setattr(os, "getsid", getsid)
    monkeypatch.setattr(os, "getpid", lambda: OWN)
    assert was_adopted(parent) is adopted
