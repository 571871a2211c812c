"""Processor time of the tests by file, and the limits that `scripts/test` prints and keeps an eye on."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import pytest

from scripts.tools.bench.machine import MOST_OTHERS, Others
from tests.sizes import report
from tests.tiers import ASIDE

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


def lines(
    tier: str, wall_s: float, processor_s: float, by_file: Mapping[str, float], others: float | None
) -> Iterator[str]:
    """Yields what a run says at its end: its times, the limits of its tier, whether other programs used the cores
    (`others`, on average), and where the time went if it is above a limit."""
    took = f"{span(wall_s)}, {span(processor_s)} of processor time"
    limit = LIMITS.get(tier)
    if limit is None:
        yield took
        return
    yield f"{took} (limits of the {tier} tier on two quiet cores: {span(limit.wall_s)}, {span(limit.processor_s)})"
    if others is not None and others > MOST_OTHERS:
        yield f"Other programs used {others:.1f} of the {os.cpu_count()} cores: compare only the processor time."
    if wall_s <= limit.wall_s and processor_s <= limit.processor_s:
        return
    yield "Above its limit. The most expensive files, by processor time:"
    for name in sorted(by_file, key=by_file.__getitem__, reverse=True)[:SHOWN]:
        yield f"{by_file[name]:7.1f} s  {name}"


class Limits:
    """The plugin: each process counts its own tests, the one that writes the summary adds them up."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # `scripts/test` says when it began: after the set-up, whose processes are children of this one, too.
        self._started = float(os.environ.get("TESTS_STARTED") or time.time())
        self._set_up_s = os.times().children_user + os.times().children_system
        self._others = Others()
        self._by_file = defaultdict[str, float](float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = used_s()
        result = yield
        self._by_file[item.nodeid.partition("::")[0]] += used_s() - before
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Hands a worker's times to the process that writes the summary, which writes its last line when the linters
        and the workers have ended: their time is then that of its children."""
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["by file"] = dict(self._by_file)
        yield
        if output is not None:
            return
        config = self._config
        whole = not config.args or config.args == config.getini("testpaths")
        tiers = [tier for tier in ("all", "full", "real", *ASIDE) if config.getoption(f"--{tier}")]
        tier = (tiers or ["fast"])[0] if whole else ""
        for line in report() if whole else ():
            config.get_terminal_writer().line(line)
        for line in lines(
            tier, time.time() - self._started, used_s() - self._set_up_s, self._by_file, self._others.cores()
        ):
            config.get_terminal_writer().line(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = cast("dict[str, dict[str, float]]", getattr(node, "workeroutput", {}))
        for name, seconds in output.get("by file", {}).items():
            self._by_file[name] += seconds
