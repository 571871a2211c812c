"""The runner, whose followers are those of `odd_follower`."""

import subprocess
from typing import Any

from runner.__main__ import main

start = subprocess.Popen.__init__


def start_odd(process: "subprocess.Popen[Any]", command: list[str], *rest: object, **options: object) -> None:
    words = [word.replace("runner.engine.ranks.follower", "tests.process.ranks.odd_follower") for word in command]
    start(process, words, *rest, **options)  # type: ignore[call-overload]


subprocess.Popen.__init__ = start_odd  # type: ignore[method-assign,assignment]
main()
