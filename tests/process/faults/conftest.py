"""What the tests of faults share."""

import gc
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, spawn
from tests.process.conftest import CHUNK_TOKENS, FAULTY, MAIN, models_dir, start
from tests.process.faults.demand import Demand

__all__ = ["models_dir", "start"]


@pytest.fixture
def quiet(frozen: None) -> Iterator[None]:
    """No log: thousands of tracebacks say nothing, and what keeps them keeps the arrays in their frames."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Python's collector looks at what is made from here on, and not each time at all modules and tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def demand(tmp_path: Path) -> Demand:
    """What goes wrong in a process that is spawned with `demand.environment`."""
    return Demand(tmp_path)


@pytest.fixture(scope="module")
def breakable(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Demand]]:
    """One process for every fault that it survives."""
    demand = Demand(tmp_path_factory.mktemp("faults"))
    arguments = ["--prefill-chunk", str(CHUNK_TOKENS), "--cache-memory", "800KiB"]
    with spawn(FAULTY, MAIN, models_dir=models_dir, arguments=arguments, environment=demand.environment) as process:
        process.wait_ready(60)
        yield process, demand
        assert process.exit_status is None
    assert not process.output.captured, "no fault of a request is told where a host takes it for one of the process"


@pytest.fixture
async def client(breakable: tuple[Process, Demand]) -> AsyncIterator[Client]:
    """A host's client of that process."""
    async with Client.of(breakable[0]) as client:
        yield client
