"""Set-up of every test: MLX without its run-time compiler, a bound on waiting, nothing left behind, and the tier."""

import faulthandler
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from runner import cpu
from tests import CORES, ROOT
from tests.lib.leftovers import holdings, leftovers
from tests.limits import Limits
from tests.linters import Linters
from tests.tiers import ASIDE, aside, is_full, is_full_file, may_hold

cpu.preload(kernels=os.environ.get("MLX_RUNNER_KERNELS", "auto"))
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # a GPU's short products differ by more than rounding

import mlx.core as mx  # noqa: E402 - the fast BLAS must be loaded first

mx.disable_compile()
settings.register_profile("full", deadline=None)  # 100 examples
settings.register_profile("fast", deadline=None, max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every test but the slow ones")
    parser.addoption("--all", action="store_true", help="run every test")
    parser.addoption("--real", action="store_true", help="run only the tests on a real model, which is fetched once")
    for tier in ASIDE:
        parser.addoption(f"--{tier}", action="store_true", help="run only the tests of this, all but the slow ones")
    parser.addoption("--lint", action="store_true", help="run ruff and mypy beside the tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, at most 8: a quarter of a worker's time is waiting for processes and sockets."""
    return min(CORES + 1, 8)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage meanwhile: ten thousand tests are none, and each look goes through all of them."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    chosen = {id(item): runs(item, config) for item in items}
    if left_out := [item for item in items if not chosen[id(item)]]:
        items[:] = [item for item in items if chosen[id(item)]]
        config.hook.pytest_deselected(items=left_out)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out a file of which the tier that was asked for has no test: its import takes time."""
    if any("::" in word for word in config.args) or config.getoption("--all") or config.getoption("--real"):
        return None
    if not collection_path.name.startswith("test_") or not collection_path.is_relative_to(ROOT):
        return None
    path = collection_path.relative_to(ROOT).as_posix()
    if asked := [tier for tier in ASIDE if config.getoption(f"--{tier}")]:
        return None if any(may_hold(tier, path) for tier in asked) else True
    if beyond_fast(config):
        return None
    return is_full_file(path) or (bool(aside(f"{path}::")) and not names_aside(config)) or None


def names_aside(config: pytest.Config) -> bool:
    """True if the command line names a file, or a folder of a tier of its own."""
    return any(word.endswith(".py") or aside(f"{word.rstrip('/')}/") for word in config.args)


def beyond_fast(config: pytest.Config) -> bool:
    """True if the run is of more than the fast tier: of another one, or of tests and files that are named."""
    return any(config.getoption(f"--{tier}") for tier in ("full", "all", "real", *ASIDE)) or any(
        "::" in word or word.endswith(".py") for word in config.args
    )


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
    asked = [tier for tier in ASIDE if config.getoption(f"--{tier}")]
    tier = aside(item.nodeid)
    if asked:
        return tier in asked
    if tier and not names_aside(config):
        return False
    return beyond_fast(config) or not (item.get_closest_marker("full") or is_full(item.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tiers = [f"--{tier}" for tier in ("full", "all", "real", *ASIDE) if not config.getoption(f"--{tier}")]
    if not any("::" in word for word in config.args) and not config.getoption("--all"):
        terminalreporter.write_line(f"The tests of other tiers are left out: scripts/test {' or '.join(tiers)}")


SLOW_S = 1200.0
"""The limit of a test of the slow tier; that of others stands in pyproject.toml."""
GRACE_S = 30.0
"""From the signal at a test's limit, which interrupts what waits in Python, to the end of the process."""
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # not yet captured
    settings.load_profile("full" if beyond_fast(config) else "fast")
    if config.getoption("--lint") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Linters())
    config.pluginmanager.register(Limits(config))  # the last: its line counts the linters


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: tuple[float, str, bool, bool]) -> Iterator[None]:
    """At its limit a test fails with the stack of the main thread first. A test that waits in C, which no exception
    reaches, ends its process a little later; another worker takes its tests."""
    yield
    stderr = item.config.stash[STDERR]
    faulthandler.register(signal.SIGALRM, file=stderr, all_threads=False, chain=True)
    faulthandler.dump_traceback_later(settings[0] + GRACE_S, exit=True, file=stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> None:
    faulthandler.cancel_dump_traceback_later()
    faulthandler.unregister(signal.SIGALRM)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Freezes what the modules hold, and what lasts of the tests before: collecting that again takes a third of a
    second, and many tests collect."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A directory of this process alone for temporary files, so that leftovers are its own. Other users may go
    through it: some tests are about files that those may not read."""
    tmp_path_factory.getbasetemp()  # chosen now, and not in here
    with tempfile.TemporaryDirectory(prefix="tests-") as name:
        os.chmod(name, 0o711)  # noqa: PTH101
        os.environ["TMPDIR"] = tempfile.tempdir = name
        yield
    del os.environ["TMPDIR"]
    tempfile.tempdir = None


UNCHECKED = (
    *(f"tests/model/engine/test_{name}.py" for name in ("engine", "ranks", "replay", "token_path")),
    "tests/real/",
)
"""Files whose tests leave an engine's thread, a tape or an event loop behind: those last as long as their process."""


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a process, a descriptor or a file. Costs a third of a millisecond."""
    if request.node.nodeid.startswith(UNCHECKED):
        yield
        return
    before = holdings()
    yield
    left = leftovers(before)
    assert not left, f"left behind: {', '.join(sorted(left))}"
