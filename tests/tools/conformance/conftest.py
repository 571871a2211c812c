"""The stage of this repository's own runner."""

from collections.abc import Iterator

import pytest

from scripts.tools.conformance import Runners
from scripts.tools.conformance.models import (
    COHERE,
    EMBEDDING,
    EMBEDDING_MEDIA,
    HEARING,
    MAIN,
    SEEING,
    SENTENCEPIECE,
    SMALL,
    UNIFIED,
)
from scripts.tools.conformance.this_runner import FAULTY, RUNNER
from scripts.tools.host.lib import G_PRIME, H


@pytest.fixture(scope="session")
def runners() -> Iterator[Runners]:
    """One for all tests of this folder. What they share is started before the first of them, and so belongs to none."""
    with Runners(RUNNER, faulty=FAULTY) as runners:
        for model in (MAIN, SMALL, SENTENCEPIECE, SEEING, HEARING, UNIFIED, EMBEDDING, EMBEDDING_MEDIA, COHERE):
            runners.shared(H, model)
        runners.shared(G_PRIME, MAIN)
        yield runners
