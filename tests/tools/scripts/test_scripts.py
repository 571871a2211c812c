"""The scripts themselves: their list, `scripts/test --python`, and the generated parts of the documents."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from runner.cli.flags import FLAGS
from runner.model.families import FAMILIES
from scripts.tools.docs.generate import architecture_table, flag_table, marks, with_parts
from tests import ROOT

SCRIPTS = ROOT / "scripts"


def test_the_readme_has_a_line_for_each_executable() -> None:
    executables = {path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert "demo" in executables
    assert set(re.findall(r"^\| `scripts/([\w-]+)", (SCRIPTS / "README.md").read_text(), re.MULTILINE)) == executables


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


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_flag_has_a_row_with_its_variable() -> None:
    rows = flag_table().splitlines()[2:]
    assert len(rows) == len(FLAGS)
    for flag, row in zip(FLAGS, rows, strict=True):
        assert row.startswith(f"| `--{flag.name} ")
        assert f"| `{flag.variable}` |" in row
        assert len(re.findall(r"(?<!\\)\|", row)) == 5


def test_every_architecture_of_the_store_is_in_the_table_once() -> None:
    table, _, _ = architecture_table().partition("\n\n")
    _, _, *rows = table.splitlines()
    found = {}
    for row in rows:
        *names, module = code_spans(row)
        found.update(dict.fromkeys(names, module))
    assert found == {name: family.module for name, family in FAMILIES.items()}
    assert len(rows) == len(set(found.values()))


def page(*parts: str) -> str:
    lines = (["# ", part, "\n", "old rows\n".join(marks(part)), "between\n"] for part in parts)
    return "".join(word for words in lines for word in words)


def test_each_part_is_put_between_its_marks_and_nowhere_else() -> None:
    parts = {"one": lambda: "1\n", "two": lambda: "2\n"}
    text = with_parts(page("two", "one"), parts)
    assert text == page("two", "one").replace("old rows", "2", 1).replace("old rows", "1", 1)
    assert with_parts(text, parts) == text
