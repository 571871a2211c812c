"""Fixtures for the tests of faults."""

import gc
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, spawn
from tests.process.conftest import CHUNK_TOKENS, FAULTY, MAIN, models_dir, start
from tests.process.faults.fault_control import FaultControl

__all__ = ["models_dir", "start"]


@pytest.fixture
def quiet(frozen: None) -> Iterator[None]:
    """Disables the log: thousands of tracebacks help nobody, and keeping them keeps the arrays of their frames."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Makes Python's garbage collector skip the modules and tests that exist already."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def faults(tmp_path: Path) -> FaultControl:
    """Arms faults in a process that is spawned with `faults.environment`."""
    return FaultControl(tmp_path)


@pytest.fixture(scope="module")
def breakable(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, FaultControl]]:
    """One process for all faults that it must survive."""
    faults = FaultControl(tmp_path_factory.mktemp("faults"))
    arguments = ["--prefill-chunk", str(CHUNK_TOKENS), "--cache-memory", "800KiB"]
    with spawn(FAULTY, MAIN, models_dir=models_dir, arguments=arguments, environment=faults.environment) as process:
        process.wait_ready(60)
        yield process, faults
        assert process.exit_status is None
    assert not process.output.captured, "no fault of a request looks like a fault of the process to a host"


@pytest.fixture
async def client(breakable: tuple[Process, FaultControl]) -> AsyncIterator[Client]:
    """A host's client of that process."""
    async with Client.of(breakable[0]) as client:
        yield client
