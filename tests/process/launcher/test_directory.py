"""The private directory: where it may lie, what is in it, which left ones are removed, and how the shim gets in."""

import fcntl
import grp
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner.ollama import directory
from runner.ollama.directory import PrivateDirectory, link_or_copy, lock, make_directory, places
from runner.ollama.launcher import execute
from runner.ollama.plan import LaunchError, Plan
from runner.settings import Start
from tests.process.launcher.standin import WAIT_S, Host, Installation, command, environment, eventually_gone
from tests.process.launcher.test_launch import MLX


def plan(installation: Installation, start: Start = "descriptor") -> Plan:
    return Plan(installation.ollama, ["serve"], [str(installation.runner)], start)


def test_a_cache_directory_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name = f"ollama-mlx-runner-{os.geteuid()}"
    first, *others = places({"XDG_CACHE_HOME": "/somewhere"})
    assert first == Path("/somewhere/ollama-mlx-runner")
    assert Path("/var/tmp", name) in others
    assert places({})[0] == places({"XDG_CACHE_HOME": "relative"})[0] == tmp_path / ".cache" / "ollama-mlx-runner"


def links(directory: Path) -> dict[str, Path]:
    """Returns the targets of the symbolic links in a directory."""
    return {path.name: path.resolve() for path in directory.iterdir() if path.is_symlink()}


def test_the_libraries_lie_where_hosts_look_for_them(installation: Installation, tmp_path: Path) -> None:
    directory = make_directory(plan(installation), environment(tmp_path))
    assert links(directory.path / "lib" / "ollama") == {path.name: path for path in installation.libraries.iterdir()}
    assert {path.name for path in directory.executable.parent.iterdir()} == {"ollama"}
    everything = make_directory(plan(installation, "symlink"), environment(tmp_path))
    assert links(everything.executable.parent) == {path.name: path for path in installation.ollama.parent.iterdir()}
    assert links(everything.path / "lib") == {"ollama": installation.libraries}


def test_a_refused_link_becomes_a_copy(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # protected_hardlinks

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "copy"
    link_or_copy(installation.ollama, target)
    assert not target.samefile(installation.ollama)
    assert target.read_bytes() == installation.ollama.read_bytes()
    assert stat.S_IMODE(target.stat().st_mode) == 0o700


def test_left_directories_are_removed_and_no_others(installation: Installation, tmp_path: Path) -> None:
    environ = environment(tmp_path)
    held, left = (make_directory(plan(installation), environ) for _ in range(2))
    os.close(left.lock)
    other = left.path.with_name("something else")
    other.mkdir()
    new = make_directory(plan(installation), environ)
    assert set(new.path.parent.iterdir()) == {held.path, new.path, other}
    with pytest.raises(BlockingIOError):
        lock(held.path, fcntl.LOCK_NB)


def test_nobody_sweeps_between_making_and_locking(installation: Installation, tmp_path: Path) -> None:
    environ = environment(tmp_path)
    first = make_directory(plan(installation), environ)
    held = lock(first.path.parent)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(make_directory, plan(installation), environ)
        try:
            with pytest.raises(TimeoutError):
                second.result(0.3)
            assert set(first.path.parent.iterdir()) == {first.path}
        finally:
            os.close(held)
        assert second.result(WAIT_S).path.exists()


def test_a_file_system_that_keeps_removed_files_is_refused(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, under another name: there the host would find itself, and not the shim."""

    def replace(directory: PrivateDirectory) -> None:
        directory.executable.rename(directory.executable.with_name(".nfs1"))
        (directory.path / "shim").rename(directory.executable)

    def become(*_: object) -> None:
        raise AssertionError("executed")

    monkeypatch.setattr(PrivateDirectory, "replace", replace)
    monkeypatch.setattr(os, "execve", become)
    directory = make_directory(plan(installation), environment(tmp_path))
    with pytest.raises(
        LaunchError, match=r" cannot be used\. Set XDG_CACHE_HOME to a directory on a local file system"
    ):
        execute(plan(installation), directory, {})
    os.close(directory.lock)
    assert eventually_gone(directory.path)


def test_a_directory_of_another_user_is_not_used(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environ = environment(tmp_path)
    first, second, _ = places(environ)
    first.parent.mkdir()
    for target in (tmp_path / "target", tmp_path / "open"):
        target.mkdir()
    (tmp_path / "open").chmod(0o777)
    first.symlink_to(tmp_path / "target")
    assert make_directory(plan(installation), environ).path.parent == second
    first.unlink()
    (tmp_path / "open").rename(first)
    assert make_directory(plan(installation), environ).path.parent == second
    shutil.rmtree(first)
    assert make_directory(plan(installation), environ).path.parent == first
    assert not any((tmp_path / "target").iterdir())


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory above the only place that there is, which is two levels below it."""
    parent = tmp_path / "parent"
    parent.mkdir()
    monkeypatch.setattr(directory, "places", lambda environ: [parent / "child" / "place"])
    return parent


def refusal(installation: Installation, tmp_path: Path) -> str:
    """Returns the reason why the place is refused; "" if it is accepted."""
    try:
        directory = make_directory(plan(installation), environment(tmp_path))
    except LaunchError as error:
        return str(error).splitlines()[1].partition(": ")[2]
    os.close(directory.lock)
    return ""


@pytest.mark.parametrize(("mode", "reason"), [(0o777, "which every user may write to"), (0o1777, ""), (0o755, "")])
def test_a_parent_that_everybody_may_write_to_is_refused(
    installation: Installation, tmp_path: Path, parent: Path, mode: int, reason: str
) -> None:
    parent.chmod(mode)
    assert refusal(installation, tmp_path) == (reason and f"lies in {parent}, {reason}")


@pytest.mark.parametrize(
    ("name", "members", "own"), [(None, [], True), (None, ["mallory"], False), ("staff", [], False)]
)
def test_a_parent_that_its_group_may_write_to_is_refused_but_for_a_group_of_ones_own(
    installation: Installation,
    tmp_path: Path,
    parent: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    members: list[str],
    own: bool,
) -> None:
    user = pwd.getpwuid(os.geteuid())
    os.chown(parent, -1, user.pw_gid)
    parent.chmod(0o775)
    group = grp.struct_group((name or user.pw_name, "x", user.pw_gid, members))
    monkeypatch.setattr(grp, "getgrgid", lambda number: group)
    assert refusal(installation, tmp_path) == ("" if own else f"lies in {parent}, which its group may write to")
    parent.chmod(0o1775)
    assert refusal(installation, tmp_path) == "", "sticky: they may add to it, not rename what is there"


def test_if_no_place_is_usable_each_is_reported(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [Path("/proc/none/below"), Path("~/.cache/x"), tmp_path / "open"]
    bad[-1].mkdir()
    bad[-1].chmod(0o777)
    bad.append(tmp_path / "open" / "mine")
    monkeypatch.setattr(directory, "places", lambda environ: bad)
    with pytest.raises(LaunchError) as caught:
        make_directory(plan(installation), environment(tmp_path))
    first, *reasons, last = str(caught.value).splitlines()
    assert first == "there is no place for a small private directory:"
    assert reasons == [
        "  /proc/none/below: No such file or directory",
        "  ~/.cache/x: you have no home directory",
        f"  {tmp_path}/open: is not a directory that only you can write to",
        f"  {tmp_path}/open/mine: lies in {tmp_path}/open, which every user may write to",
    ]
    assert "XDG_CACHE_HOME" in last


def test_a_place_mounted_noexec_is_not_used(installation: Installation, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    script = 'mount -t tmpfs -o noexec none "$1" && for at in $2; do mount --bind "$1" "$at"; done; shift 2; exec "$@"'
    enter = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(place)]
    try:
        tried = subprocess.run([*enter, "/var/tmp", "true"], capture_output=True, timeout=WAIT_S)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if tried.returncode:
        pytest.skip(f"may not mount: {tried.stderr.decode().strip()}")
    argv = command(installation, "descriptor")
    with Host([*enter, "", *argv], environment(tmp_path), tmp_path) as host:
        assert host.report.libraries.startswith(f"{tmp_path}/ollama-mlx-runner-"), "in TMPDIR"
        assert host.spawn(*MLX[0]).report.executable == str(installation.runner)
    nowhere = environment(tmp_path, TMPDIR=str(place))
    refused = subprocess.run([*enter, "/var/tmp", *argv], env=nowhere, capture_output=True, text=True, timeout=WAIT_S)
    assert refused.returncode == 1
    first, *reasons, _ = refused.stderr.splitlines()
    assert first == "Error: there is no place for a small private directory:"
    assert len(reasons) == 3
    assert all(reason.endswith(": is mounted noexec, so that no program can be executed there") for reason in reasons)


def test_by_symlink_every_moment_of_the_exchange_is_right(installation: Installation, tmp_path: Path) -> None:
    """As on macOS: before it the host finds itself and its libraries, after it the shim and the same libraries."""
    environ = environment(tmp_path, STANDIN_RESOLVE="start")
    directory = make_directory(plan(installation, "symlink"), environ)
    with Host([str(directory.executable), "serve"], environ, tmp_path) as host:
        assert Path(host.report.libraries).samefile(installation.libraries)
        assert host.spawn(*MLX[0]).report.executable == str(installation.ollama)
        directory.replace()
        for _ in range(2):
            assert host.spawn(*MLX[0]).report.executable == str(installation.runner)
    # What a host finds that looks only after the exchange: the same names in the shim's directory.
    assert (directory.executable.parent / ".." / "lib" / "ollama").samefile(installation.libraries)
    assert (directory.executable.parent / "ollama-helper").samefile(installation.ollama.parent / "ollama-helper")
