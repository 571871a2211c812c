"""The stage of this repository's own runner."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import Stage

RUNNER = (sys.executable, "-m", "runner")
FAULTY = (sys.executable, str(Path(__file__).parent.parent / "process" / "faulty.py"))


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """One for all tests of this folder; its processes are started when they are needed."""
    with Stage(RUNNER, faulty=FAULTY) as stage:
        yield stage
