"""Published Gemmas with assistants."""

from collections.abc import Callable

import pytest

from scripts.tools.models.assistants import config_of
from scripts.tools.models.sources import Published
from tests.model.drafts.assistant.made import Pair, pair_of, write
from tests.model.loading.stored import Stored, put

Pairs = Callable[[str, str], Pair]


@pytest.fixture(scope="module")
def target(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A Gemma 4 whose last layers have no keys and values of their own."""
    return put(tmp_path_factory.mktemp("store"), "gemma4-text", published("gemma4-text"))


@pytest.fixture(scope="module")
def pairs(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Targets by their names, with random assistants of some kind: their drafts are hardly ever right."""
    found: dict[tuple[str, str], Pair] = {}

    def get(name: str, kind: str = "every token") -> Pair:
        if (name, kind) not in found:
            opened = put(tmp_path_factory.mktemp("store"), name, published(name)).open()
            found[name, kind] = pair_of(opened, write(tmp_path_factory.mktemp("assistant"), config_of(kind)))
        return found[name, kind]

    return get
