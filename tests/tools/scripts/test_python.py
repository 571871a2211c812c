"""`scripts/test --python`: it finds the interpreter, and says so where there is none."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

VERSION = "3.999"
INTERPRETER = f"""#!/bin/sh
case "$*" in
  *'sys.version_info[:2]'*) echo {VERSION} ;;
  *'-m venv'*) echo "$0 makes it" >&2; exit 7 ;;
esac
"""
"""It says which Python it is, and makes no environment."""


def run_with(**environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(ROOT / "scripts" / "test"), "--python", VERSION]
    without = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "RUNNER_VENV")}
    variables = {**without, "PYENV_ROOT": "/nowhere", **environment}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert not (ROOT / f".venv-{VERSION}").exists()
    return done


def test_a_python_that_is_not_there_is_named() -> None:
    done = run_with()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Python {VERSION} was not found: there is no python{VERSION} on PATH.")


@pytest.mark.parametrize("place", ["PYTHON", "PATH", "PYENV_ROOT"])
def test_the_interpreter_is_found_and_makes_an_environment_of_its_own(place: str, tmp_path: Path) -> None:
    path = tmp_path / "versions" / f"{VERSION}.1" / "bin" / f"python{VERSION}"
    path.parent.mkdir(parents=True)
    path.write_text(INTERPRETER)
    path.chmod(0o755)
    path.with_name("python").symlink_to(path)
    places = {
        "PYTHON": str(path),
        "PATH": f"{path.parent}:{os.environ['PATH']}",
        "PYENV_ROOT": str(tmp_path),
    }
    done = run_with(**{place: places[place]})
    assert done.returncode == 7
    assert f"Setting up .venv-{VERSION} " in done.stderr
    assert f"{path.parent}/python" in done.stderr
