"""The runner, whose followers are those of `odd_follower`. Its own memory runs out in a long answer if `ODD` is
`leader`.
"""

import os
import subprocess
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from runner.__main__ import main
from runner.ranks import rank_world

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.engine.generation import Forward
    from runner.tape.tape import Tape

POSITION = 300
"""The position at which memory runs out, behind all that is computed before the first request."""

start = subprocess.Popen.__init__


def start_odd(process: "subprocess.Popen[Any]", command: list[str], *rest: object, **options: object) -> None:
    words = [word.replace("runner.ranks.follower", "tests.process.ranks.odd_follower") for word in command]
    start(process, words, *rest, **options)  # type: ignore[call-overload]


def without_memory(run: "Forward", tape: "Tape") -> "Forward":
    checked = forward(run, tape)

    def computed(tokens: "mx.array", layers: list[object]) -> "mx.array":
        if rank_world._position(layers) > POSITION:
            raise RuntimeError("[malloc] Unable to allocate 12 bytes.")
        return checked(tokens, layers)

    return computed


forward = rank_world.checked_forward
if os.environ["ODD"] == "leader":
    patch.object(rank_world, "checked_forward", without_memory).start()
subprocess.Popen.__init__ = start_odd  # type: ignore[method-assign,assignment]
main()
