"""Miniature benchmarks measure nothing worth knowing: whether the machine is busy is no matter to them."""

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.machine import Others


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "check_quiet", lambda: None)
    monkeypatch.setattr(Others, "check", lambda _: None)
