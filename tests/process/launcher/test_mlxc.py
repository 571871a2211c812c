"""The empty MLX library: what makes a host need it, what is in it, and that it stands behind all others."""

import ctypes
import shutil
from pathlib import Path

import pytest

from runner.ollama.directory import make_directory
from runner.ollama.mlx_library import LIBRARY, library_functions, write_library
from runner.ollama.plan import Plan
from tests.process.launcher.standin import Installation, environment, reason_to_skip

CHECKED = b"\0this model requires MLX support, but the MLX runtime is not available\0"
NAMES = b"\0mlx_add\0_mlx_error\0mlx_load_safetensors\0mlx_set_error_handler\0a mlx_conv1d\0mlx_not\x01CHECK: mlx_x_\0"
FOUND = ["_mlx_error", "mlx_add", "mlx_conv1d", "mlx_load_safetensors", "mlx_set_error_handler"]
ERROR = "Ollama has no working MLX library; mlx-runner ollama serve gave it an empty one"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """An executable with the texts of a host that looks for an MLX library."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    path = tmp_path / "host"
    path.write_bytes(b"\x7fELF" + NAMES + CHECKED)
    return path


def test_hosts_that_do_without_get_none(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(NAMES)
    assert library_functions(old) == []
    assert write_library(old, tmp_path)
    assert set(tmp_path.iterdir()) == {old}


def test_it_has_every_function_and_reading_tensors_fails(host: Path, tmp_path: Path) -> None:
    assert library_functions(host) == FOUND
    assert write_library(host, tmp_path)
    library = ctypes.CDLL(str(tmp_path / LIBRARY))
    told = []
    handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)(lambda text, data: told.append((text, data)))
    assert library.mlx_load_safetensors() == 1
    library.mlx_set_error_handler(handler, ctypes.c_void_p(5), None)
    assert [getattr(library, name)() for name in ("mlx_add", "_mlx_error", "mlx_conv1d")] == [0, 0, 0]
    assert told == []
    assert library.mlx_load_safetensors() == 1
    assert told == [(ERROR.encode(), 5)]


def test_a_missing_compiler_is_reported(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    directory = make_directory(Plan(host, ["serve"], ["runner"], "descriptor"), environment(tmp_path))
    assert capsys.readouterr().err.startswith("mlx-runner: there is no working C compiler (cc). ")
    assert not (directory.path / "lib").exists()


def test_it_stands_beside_the_libraries_and_never_in_place_of_one(
    host: Path, installation: Installation, tmp_path: Path
) -> None:
    shutil.copy(host, installation.ollama)
    plan = Plan(installation.ollama, ["serve"], ["runner"], "descriptor")
    first = make_directory(plan, environment(tmp_path)).path / "lib" / "ollama"
    assert {path.name for path in first.iterdir()} == {"libggml.so", "mlx_cuda_v13", LIBRARY}
    assert not (first / LIBRARY).is_symlink()
    own = installation.libraries / LIBRARY
    own.write_bytes(b"its own")
    second = make_directory(plan, environment(tmp_path)).path / "lib" / "ollama"
    assert (second / LIBRARY).resolve() == own
