"""Processor time of the tests by file, and the limits that `scripts/test` prints and keeps an eye on."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import pytest

SHOWN = 10
"""Files that a run above its limit names."""


class Limit(NamedTuple):
    """For one tier, on two quiet cores."""

    wall_s: float
    processor_s: float


LIMITS = {"fast": Limit(4 * 60, 8 * 60), "full": Limit(15 * 60, 30 * 60)}


def used_s() -> float:
    """Returns the processor time of this process and of its children that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def span(seconds: float) -> str:
    """Returns a time as people say it: "3 min 5 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def lines(tier: str, wall_s: float, processor_s: float, by_file: Mapping[str, float]) -> Iterator[str]:
    """Yields what a run says at its end: its times, the limits of its tier, and where the time went if it is above."""
    took = f"{span(wall_s)}, {span(processor_s)} of processor time"
    limit = LIMITS.get(tier)
    if limit is None:
        yield took
        return
    yield f"{took} (limits of the {tier} tier on two quiet cores: {span(limit.wall_s)}, {span(limit.processor_s)})"
    if wall_s <= limit.wall_s and processor_s <= limit.processor_s:
        return
    yield "Above its limit. The most expensive files, by processor time:"
    for name in sorted(by_file, key=by_file.__getitem__, reverse=True)[:SHOWN]:
        yield f"{by_file[name]:7.1f} s  {name}"


class Limits:
    """The plugin: each process counts its own tests, the one that writes the summary adds them up."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # `scripts/test` says when it began; its linters are children of this process, since it replaced the script.
        self._started = float(os.environ.get("TESTS_STARTED") or time.time())
        self._workers_s = 0.0
        self._before_s = used_s()  # of the linters; workers report their own time
        self._by_file = defaultdict[str, float](float)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = used_s()
        yield
        self._by_file[item.nodeid.partition("::")[0]] += used_s() - before

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Hands a worker's numbers to the process that writes the summary."""
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["processor time"] = used_s(), dict(self._by_file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = cast("dict[str, tuple[float, dict[str, float]]]", getattr(node, "workeroutput", {}))
        processor_s, by_file = output.get("processor time", (0.0, {}))
        self._workers_s += processor_s
        for name, seconds in by_file.items():
            self._by_file[name] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        config = self._config
        whole = not config.args or config.args == config.getini("testpaths")
        tiers = [tier for tier in ("all", "full", "real") if config.getoption(tier)]
        tier = (tiers or ["fast"])[0] if whole else ""
        text = lines(tier, time.time() - self._started, self._used_s() + self._workers_s, self._by_file)
        for line in text:
            terminalreporter.write_line(line)

    def _used_s(self) -> float:
        """Returns the time of this process, of the linters before it, and of the children of tests that it ran itself.
        With workers, its children are those, which report what they used."""
        times = os.times()
        return used_s() if self._workers_s == 0 else times.user + times.system + self._before_s
