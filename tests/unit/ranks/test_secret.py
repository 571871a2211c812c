"""The file of the secret is refused if others could know what is in it."""

import os
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.ranks.handshake import read_secret

SECRET = b"f0e1d2c3b4a5968778695a4b3c2d1e0f"


@pytest.fixture(name="path")
def path_of_secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET + b"\n")
    return path


@pytest.mark.parametrize("data", [SECRET, SECRET + b"\n", b" " + SECRET + b"\r\n\n"])
def test_white_space_around_a_secret_is_none_of_it(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert read_secret(path) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o610, 0o777])
def test_a_file_that_others_may_open_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(RunnerError, match=rf"--secret-file {path}: other users may .*: chmod 600 {path}$"):
        read_secret(path)


def test_a_file_of_somebody_else_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RunnerError, match="belongs to another user"):
        read_secret(path)


@pytest.mark.parametrize("data", [b"", b"\n" * 40, b"x" * 15, b"x" * 15 + b"\n" * 20, b"x" * 4097])
def test_a_short_secret_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(RunnerError, match="a secret has 16 to 4096 bytes: make one with openssl rand -hex 32"):
        read_secret(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="no such file: make one"):
        read_secret(tmp_path / "none")
    with pytest.raises(RunnerError, match="directory"):
        read_secret(tmp_path)
