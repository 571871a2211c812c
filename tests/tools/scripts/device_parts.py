"""Parts of a device check that pass, differ, crash and hang. Each notes that it ran."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.tools.device.parts import Row

NOTES = "DEVICE_NOTES"
"""The variable with the file of the notes."""


def ran(name: str) -> None:
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.write(f"{name} ")


def installation(*, tiny: bool) -> Iterator[Row]:
    ran("installation")
    yield Row("device", "a GPU", figures={"device": "Some GPU/1", "ms": 1.23456})


def differs(*, tiny: bool) -> Iterator[Row]:
    ran("differs")
    Path(os.environ["DEVICE_TAPES"], "wrong.tape").write_bytes(b"tape")
    sys.stdout.write(f"a library writes of {Path.home()}/x\n")
    yield Row("right", "as it should be")
    yield Row("wrong", f"{Path.home()}/models differs", good=False)


def crashes(*, tiny: bool) -> Iterator[Row]:
    ran("crashes")
    yield Row("before", "tiny" if tiny else "whole")
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(*, tiny: bool) -> Iterator[Row]:
    ran("raises")
    yield from ()
    raise RuntimeError("no kernel")


def hangs(*, tiny: bool) -> Iterator[Row]:
    """Cannot be told to end, finds that wrong, and has started a process that is as deaf."""
    ran("hangs")
    wrong = '{"name": "ended", "found": "too early", "good": false}\n'
    signal.signal(signal.SIGTERM, lambda *_: os.write(sys.stdout.fileno(), wrong.encode()))
    yield Row("child", str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid))
    while True:
        time.sleep(1000)


def passes(*, tiny: bool) -> Iterator[Row]:
    ran("passes")
    yield Row("right", "as it should be")
