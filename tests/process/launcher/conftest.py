"""The stand-in for Ollama, built once, and an installation of it for each test."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.process.launcher import standin
from tests.process.launcher.standin import Installation


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """The virtual environment of `standin.COMMAND`: the script sets it up where there is none."""
    subprocess.run([*standin.SCRIPT, "--help"], stdout=subprocess.DEVNULL, check=True)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stand-in."""
    if reason := standin.reason_to_skip():
        pytest.skip(reason)
    return standin.build(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def installation(program: Path, tmp_path: Path) -> Installation:
    return standin.install(program, tmp_path)


@pytest.fixture(autouse=True)
def closed(nothing_left: None, tmp_path: Path) -> Iterator[None]:
    """Closes what this process opened below `tmp_path`: a launcher holds its lock until it ends as Ollama."""
    yield
    for link in list(Path("/proc/self/fd").glob("*")):
        with suppress(OSError):
            if link.readlink().is_relative_to(tmp_path):
                os.close(int(link.name))
