"""Published models for the tests of each folder."""

import pytest

from scripts.tools.models.sources import Published


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Published models, written once for the tests of a file."""
    return Published(tmp_path_factory.mktemp("published"))
