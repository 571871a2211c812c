"""The first lines of the process: what can go wrong before anything else is there."""

import os
import subprocess
import sys
from pathlib import Path

from scripts.tools.models.scripted import BYTES, write_scripted
from tests import ROOT
from tests.lib.programs import python


def check_error(done: "subprocess.CompletedProcess[str]", start: str) -> None:
    assert done.returncode == 1
    assert done.stderr.startswith(start)
    assert done.stderr.count("\n") == 1


def test_a_broken_installation_is_one_error_line() -> None:
    done = python("-S", "-m", "runner", "--help", cwd=ROOT)
    check_error(done, "Error: the installation is broken: No module named ")


def test_too_little_memory_for_the_imports_is_one_error_line() -> None:
    code = (
        "import sys; from runner import __main__\n"
        "class Full:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'runner.app': raise MemoryError\n"
        "sys.meta_path.insert(0, Full()); __main__.main()"
    )
    check_error(python("-c", code, cwd=ROOT), "Error: the runner cannot start in so little memory: raise the limit ")


def test_streams_that_are_closed_are_not_left_to_the_next_socket() -> None:
    code = (
        "import os, socket; from runner import __main__\n"
        "__main__._open_missing_streams()\n"
        "taken = socket.socket().fileno()\n"
        "os.write(1, b'%d %d' % (taken, os.fstat(2).st_rdev == os.stat(os.devnull).st_rdev))"
    )
    command = f'exec {sys.executable} -c "$0" 2>&- <&-'
    done = subprocess.run(["sh", "-c", command, code], cwd=ROOT, stdout=subprocess.PIPE, timeout=30, check=False)
    taken, is_null = done.stdout.split()
    assert int(taken) > 2
    assert is_null == b"1"


def test_a_missing_mlx_is_reported_with_what_to_install(tmp_path: Path) -> None:
    model = write_scripted(tmp_path / "model", BYTES, {}, [0])
    (tmp_path / "mlx").mkdir()  # stands before the real one, and has no core
    (tmp_path / "mlx" / "__init__.py").touch()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = python("-m", "runner", "--model", str(model), "--log-level", "error", cwd=ROOT, env=environ)
    check_error(done, "Error: MLX not available: No module named 'mlx.core'; run `")


def test_the_fault_of_a_model_is_the_last_line_after_the_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = python("-m", "runner", "--model", str(tmp_path), cwd=ROOT)
    assert done.returncode == 1
    *_, advice, last = done.stderr.splitlines()
    assert "level=WARN" in advice
    assert "`mlx-runner check NAME`" in advice
    assert last.startswith("Error: ")
