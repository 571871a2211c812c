"""What holds for every test: MLX without its run-time compiler, a bound on waiting, slow tests only on request."""

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import settings

from runner import blas

blas.preload()
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # a GPU's short products differ by more than rounding

import mlx.core as mx  # noqa: E402 - the fast BLAS must be loaded first

mx.disable_compile()
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


TEST_S = 600.0
"""For one async test: what waits for ever fails with its name."""


def bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def within(*arguments: object, **named: object) -> None:
        async with asyncio.timeout(TEST_S):
            await test(*arguments, **named)

    return within


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = bounded(item.obj)
    if config.getoption("--all"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: scripts/test --all"))
