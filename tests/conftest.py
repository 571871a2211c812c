"""What holds for every test: MLX without its run-time compiler, and slow tests only on request."""

import pytest
from hypothesis import settings

from runner import blas

blas.preload()

import mlx.core as mx  # noqa: E402 - the fast BLAS must be loaded first

mx.disable_compile()
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: scripts/test --all"))
