"""Fixtures for the tests of faults."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.conftest import models_dir, start
from tests.process.faults.fault_control import FaultControl

__all__ = ["models_dir", "start"]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Disables the log: thousands of tracebacks help nobody, and keeping them keeps the arrays of their frames."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def faults(tmp_path: Path) -> FaultControl:
    """Arms faults in a process that is spawned with `faults.environment`."""
    return FaultControl(tmp_path)
