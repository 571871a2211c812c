"""A runner with bad manners: `spoiled.py MANNER ARGUMENT...` starts this repository's runner and spoils one thing.

* `noisy`    writes a line with a marker first
* `short`    has a context of 40 tokens
* `tracing`  writes a traceback at SIGINT
"""

import os
import signal
import subprocess
import sys
from types import FrameType

RUNNER = [sys.executable, "-m", "runner"]


def noisy(words: list[str]) -> None:
    os.write(2, b"note: mlx: using device gpu\n")
    replace(words)


def short(words: list[str]) -> None:
    replace([*words, "--context", "40"])


def tracing(words: list[str]) -> None:
    runner = subprocess.Popen([*RUNNER, *words], start_new_session=True)

    def complain(number: int, frame: FrameType | None) -> None:
        os.write(2, b"Traceback (most recent call last):\nKeyboardInterrupt\n")
        runner.kill()

    signal.signal(signal.SIGINT, complain)
    sys.exit(abs(runner.wait()))


def replace(words: list[str]) -> None:
    """Becomes the runner."""
    os.execv(RUNNER[0], [*RUNNER, *words])


if __name__ == "__main__":
    _, manner, *words = sys.argv
    globals().get(manner, sys.exit)(words)
