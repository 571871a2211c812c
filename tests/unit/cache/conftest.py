"""Fixtures that the tests of layers share."""

from collections.abc import Iterator

import pytest

from tests.lib.memory import exact_memory


@pytest.fixture
def exact_bytes() -> Iterator[None]:
    with exact_memory():
        yield
