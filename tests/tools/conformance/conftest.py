"""The stage of this repository's own runner."""

from collections.abc import Iterator

import pytest

from scripts.tools.conformance import Stage
from scripts.tools.conformance.own import FAULTY, RUNNER


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """One for all tests of this folder; its processes are started when they are needed."""
    with Stage(RUNNER, faulty=FAULTY) as stage:
        yield stage
