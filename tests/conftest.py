"""Set-up of every test: MLX without its run-time compiler, a bound on waiting, and the test's tier."""

import asyncio
import functools
import gc
import inspect
import os
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import settings

from runner import blas
from tests.limits import Limits
from tests.tiers import is_full

blas.preload()
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # a GPU's short products differ by more than rounding

import mlx.core as mx  # noqa: E402 - the fast BLAS must be loaded first

mx.disable_compile()
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every test but the slow ones")
    parser.addoption("--all", action="store_true", help="run every test")
    parser.addoption("--real", action="store_true", help="run only the tests on a real model, which is fetched once")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Limits(config))


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
    left_out = [item for item in items if not runs(item, config)]
    if left_out:
        items[:] = [item for item in items if runs(item, config)]
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = len(left_out)


LEFT_OUT = pytest.StashKey[int]()


def runs(item: pytest.Item, config: pytest.Config) -> bool:
    """True if the tier that was asked for holds this test, or if the command line names it or, unless it is slow, its
    file."""
    if any("::" in word for word in config.args):
        return True
    if config.getoption("--real") or item.get_closest_marker("real"):
        return bool(config.getoption("--real") and item.get_closest_marker("real"))
    if config.getoption("--all"):
        return True
    if item.get_closest_marker("slow"):
        return False
    if config.getoption("--full") or any(word.endswith(".py") for word in config.args):
        return True
    return not (item.get_closest_marker("full") or is_full(item.nodeid))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands a worker's number of tests left out to the process that writes the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Takes that number; every worker collects the same tests."""
    output, config = getattr(node, "workeroutput", {}), getattr(node, "config", None)
    if isinstance(config, pytest.Config):
        config.stash[LEFT_OUT] = output.get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        tiers = [tier for tier in ("--full", "--all", "--real") if not config.getoption(tier)]
        terminalreporter.write_line(f"{left_out} tests of other tiers left out: scripts/test {' or '.join(tiers)}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes what the tests' modules hold: a collection takes a third of a second with it, and some tests collect."""
    gc.collect()
    gc.freeze()
