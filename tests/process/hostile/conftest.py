"""One process for all hostile tests, so that what one test leaves behind affects the next ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tools.models.store import write_store
from tests.process.conftest import running
from tests.process.hostile.victim import HOST, MODEL, Victim, write_victim


@pytest.fixture(scope="session")
def victim_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("victim")
    write_store(directory / "store", MODEL, write_victim(directory / "model"))
    return directory / "store"


@pytest.fixture(scope="session")
def victim(victim_store: Path) -> Iterator[Victim]:
    with running(MODEL, victim_store, generation=HOST) as process:
        yield Victim(process)
        assert process.exit_status is None, "it outlived everything"
