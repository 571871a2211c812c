"""Runners of several ranks, and what became of their processes."""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.tools.host.lib import Process
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store
from tests.process.conftest import RANDOM

ODD = (sys.executable, "-m", "tests.process.ranks.odd_leader")
"""A runner of ranks with a fault in one of them: see `odd_leader` and `odd_follower`."""

WAIT_S = 60.0
"""The most that is waited for what takes a moment, or the 10 s after which a silent rank is given up."""


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model that four ranks can split."""
    directory = tmp_path_factory.mktemp("wide")
    source = write_checkpoint(directory / "source", "llama", overrides={"num_key_value_heads": 4})
    write_store(directory / "models", RANDOM, source)
    return directory / "models"


def followers(process: Process) -> list[int]:
    """Returns the processes of the followers, in the order of their ranks."""
    return sorted(pid for pid, command in children(process).items() if "follower" in command)


def children(process: Process) -> dict[int, str]:
    """Returns the processes that a process has started, each with its command."""
    found = Path(f"/proc/{process.pid}/task").glob("*/children")
    return {int(pid): _command(int(pid)) for file in found for pid in file.read_text().split()}


def ended(pids: Sequence[int]) -> bool:
    """Returns True once none of these processes is left, and False if one is after WAIT_S."""
    until_s = time.monotonic() + WAIT_S
    while any(_state(pid) not in "ZX" for pid in pids):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def check_logs(process: Process, requests: int, ranks: int = 2) -> dict[str, dict[str, str]]:
    """Checks that all ranks say the same of this many requests. Returns what they say."""
    until_s = time.monotonic() + WAIT_S
    while True:
        lines = process.output.lines
        there = all(len(completions(lines, rank)) >= requests for rank in range(ranks))
        if there or time.monotonic() > until_s:
            break
        time.sleep(0.02)
    told = completions(lines, 0)
    assert len(told) == requests
    assert [completions(lines, rank) for rank in range(ranks)] == [told] * ranks
    return told


_COUNTS = (
    *("outcome", "total", "matched", "cached", "left", "evicted_bytes"),
    *("scored", "generated", "forced", "drafted", "accepted"),
)


def completions(lines: Sequence[str], rank: int) -> dict[str, dict[str, str]]:
    """Returns what the log of a rank says of each request that has ended, as far as all ranks say it, by number."""
    found = {}
    for line in lines:
        fields = dict(re.findall(r" (\w+)=(\S+)", line))
        if "msg=completion" in line and int(fields.get("rank", 0)) == rank:
            found[fields["request"]] = {name: fields[name] for name in _COUNTS if name in fields}
    return found


def error_lines(process: Process) -> list[str]:
    """Returns the lines that a host reports to its user."""
    return [line for line in process.output.lines if line.startswith("Error:")]


def ticks(pid: int) -> int:
    """Returns the processor time of a process, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 100 // os.sysconf("SC_CLK_TCK")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
