"""`scripts/environment`: help without a set-up, and set-ups that fail, are interrupted, and run again.

The set-ups are those of a stand-in for Python, which notes what it is asked to do.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.tools.bench.__main__ import BENCHMARKS
from scripts.tools.usage import RIGHT
from tests import ROOT

SCRIPTS = ROOT / "scripts"
EXECUTABLES = sorted(path.name for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK))
HELP = [*((name, "--help") for name in EXECUTABLES), *(("bench", name, "-h") for name in BENCHMARKS)]
SHELL_ONLY = ("browser", "lock", "test")
PYTHON = """#!/bin/sh
# Stands in for Python: as an interpreter, as one with packages in the environment that it has made, and as a tool.
echo "$*" >> "$NOTES"
case "$*" in
  *version_info*) exit ${OLD-0} ;;
  --version) echo Python 3.9.6 ;;
  *fcntl*) exec "$REAL" "$@" ;;
  *ensurepip*) exit ${WITHOUT_VENV-0} ;;
  "-m venv "*)
    mkdir -p "$3/bin" "$3/lib"
    touch "$3/pyvenv.cfg"
    cmp -s "$0" "$3/bin/python" || cp "$0" "$3/bin/python" ;;
  "-m pip --version") [ -d "$(dirname "$0")/../lib" ] ;;
  "-m pip install "*) [ "$FAILS" != yes ] || { echo "ERROR: no connection"; exit 1; } ;;
  *tools.usage*) exit 100 ;;
  "$TOOL"*) if true >&9; then echo the lock is still held; fi 2> /dev/null ;;
esac
"""


class Done(NamedTuple):
    status: int
    output: str
    errors: str


class Place:
    """A directory with the stand-in, in which a script may set up its environment. Scripts run through symlinks."""

    def __init__(self, directory: Path) -> None:
        self.environment = directory / "not made yet" / "its environment"
        self._links = directory / "links"
        self._links.mkdir()
        self._notes = directory / "notes"
        self._python = directory / "python"
        self._python.write_text(PYTHON)
        self._python.chmod(0o755)

    def start(self, *words: str, **variables: str) -> "subprocess.Popen[str]":
        self._notes.write_text("")
        environ = {"PATH": os.defpath, "CDPATH": ".", "RUNNER_VENV": str(self.environment), "PYTHON": str(self._python)}
        environ |= {"NOTES": str(self._notes), "REAL": sys.executable, "TOOL": TOOL, **variables}
        link, pipe = self._links / words[0], subprocess.PIPE
        if not link.exists():
            link.symlink_to(SCRIPTS / words[0])
        command = [f"links/{words[0]}", *words[1:]]
        return subprocess.Popen(command, cwd=self._links.parent, env=environ, stdout=pipe, stderr=pipe, text=True)

    def run(self, *words: str, **variables: str) -> Done:
        with self.start(*words, **variables) as process:
            output, errors = process.communicate(timeout=60)
        return Done(process.returncode, output, errors)

    @property
    def steps(self) -> list[str]:
        """The commands that the last run gave to Python in order to set up, or to start a tool."""
        lines = self._notes.read_text().splitlines()
        return [
            " ".join(line.partition(" /")[0].split()[:3])
            for line in lines
            if line.startswith("-m ") and "--version" not in line
        ]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


VENV, INSTALL, COMPILE, TOOL = "-m venv", "-m pip install", "-m compileall -q", "-m scripts.tools.real.main"
SET_UP = [INSTALL, INSTALL, COMPILE]


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_comes_before_the_set_up(place: Place, words: Sequence[str]) -> None:
    """Help needs the standard library alone. Where no tool in Python parses the words, it needs no Python."""
    done = place.run(*words, PYTHON="none" if words[0] in SHELL_ONLY else sys.executable)
    assert (done.status, done.errors) == (0, "")
    assert done.output.startswith("usage: ")
    assert not place.environment.exists()


def test_wrong_words_are_refused_before_the_set_up(place: Place) -> None:
    done = place.run("train_demo_model", "--step", "x", PYTHON=sys.executable)
    assert (done.status, done.output) == (2, "")
    assert "argument --steps: invalid int value: 'x'" in done.errors
    assert not place.environment.exists()
    right = [sys.executable, "-S", "-B", "-m", "scripts.tools.usage", "scripts.tools.demo.train", "--steps", "1"]
    assert subprocess.run(right, cwd=ROOT, timeout=60, check=False).returncode == RIGHT


def test_it_sets_up_once(place: Place) -> None:
    assert place.run("real-model")[:2] == (0, "")
    assert place.steps == [VENV, *SET_UP, TOOL]
    assert place.run("real-model")[:2] == (0, "")
    assert place.steps == [TOOL]


def test_a_set_up_that_fails_says_what_to_do_and_the_next_one_begins_anew(place: Place) -> None:
    done = place.run("real-model", FAILS="yes")
    assert done.status == 1
    assert "no connection\nscripts/real-model: fetching and installing packages over the network failed:" in done.errors
    assert place.steps[-1] == INSTALL
    left = place.environment / "lib" / "half"
    left.touch()
    assert place.run("real-model").status == 0
    assert place.steps == [VENV, *SET_UP, TOOL]
    assert not left.exists(), "pip would take it for a package"


def test_a_directory_that_is_no_environment_keeps_its_lib(place: Place) -> None:
    own = place.environment / "lib" / "own"
    own.parent.mkdir(parents=True)
    own.touch()
    for _ in range(2):
        done = place.run("real-model", FAILS="yes")
        assert (done.status, place.steps) == (1, [])
        assert "is no virtual environment: remove it, or name another one in RUNNER_VENV." in done.errors
    assert [*place.environment.iterdir()] == [own.parent]


def test_of_two_set_ups_the_second_waits(place: Place) -> None:
    assert place.run("real-model").status == 0
    mark = place.environment / "installed-from"
    wanted = mark.read_text()
    mark.write_text("unfinished\n")
    with (place.environment / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with place.start("real-model") as second:
            assert second.stderr is not None
            assert second.stderr.readline() == f"Waiting for another script, which sets up {place.environment} ...\n"
            mark.write_text(wanted)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.communicate(timeout=60) == ("", "")
    assert second.returncode == 0
    assert place.steps == [TOOL]


def test_an_environment_that_is_out_of_date_keeps_what_it_has(place: Place) -> None:
    assert place.run("real-model").status == 0
    own = place.environment / "lib" / "own"
    own.touch()
    (place.environment / "installed-from").write_text("123 456\n")
    assert place.run("real-model").status == 0
    assert place.steps == [*SET_UP, TOOL]
    assert own.exists()


def test_a_python_that_will_not_do_is_named_with_the_remedy(place: Place) -> None:
    old = place.run("real-model", OLD="1")
    assert old.status == 1
    assert "Python 3.11 or newer is needed" in old.errors
    assert "is Python 3.9.6: set PYTHON" in old.errors
    assert not place.environment.exists()
    bare = place.run("real-model", WITHOUT_VENV="1")
    assert bare.status == 1
    assert "sudo apt-get install python3-venv" in bare.errors
    assert place.steps == []
