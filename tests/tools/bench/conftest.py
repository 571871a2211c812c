"""Miniature benchmarks measure nothing worth knowing: whether the machine is busy is no matter to them."""

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.machine import BLAS, Others


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BLAS:
        monkeypatch.setenv(name, "auto")  # a benchmark sets them
    monkeypatch.setattr(bench, "check_quiet", lambda: None)
    monkeypatch.setattr(Others, "check", lambda _: None)
