"""The stage of this repository's own runner."""

from collections.abc import Iterator

import pytest

from scripts.tools.conformance import Runners
from scripts.tools.conformance.this_runner import FAULTY, RUNNER


@pytest.fixture(scope="session")
def runners() -> Iterator[Runners]:
    """One for all tests of this folder; its processes are started when they are needed."""
    with Runners(RUNNER, faulty=FAULTY) as runners:
        yield runners
