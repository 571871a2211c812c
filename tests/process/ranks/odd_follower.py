"""A follower with a fault in it; `ODD` names what goes wrong.

* `unwilling` it never joins
* `token`     its answers have other tokens than the leader's
* `draws`     it draws other tokens than the leader
* `position`  it believes that its forwards begin elsewhere
* `memory`    its memory runs out

All but the first wait for the first request.
"""

import os
import sys
import time
from unittest.mock import patch

from runner.ranks.follower import Follower, run_follower

ODD = os.environ["ODD"]
answering = False


def _note_requests() -> None:
    from runner.tape.recording import TapedRequests

    take = TapedRequests.apply

    def taken(requests: TapedRequests, *words: object) -> None:
        global answering
        answering = True
        take(requests, *words)  # type: ignore[arg-type]

    patch.object(TapedRequests, "apply", taken).start()


def _patch() -> None:
    """Makes the fault. MLX may be imported."""
    import mlx.core as mx

    from runner.ranks import group, rank_world

    _note_requests()
    agreement, position, forward = group.agreement, rank_world._position, rank_world.checked_forward

    def agreed(token: mx.array, ranks: mx.distributed.Group) -> mx.array:
        return agreement(token, ranks) + int(answering)

    def elsewhere(layers: list[object]) -> int:
        return position(layers) + int(answering)

    def without_memory(run: object, tape: object) -> object:
        checked = forward(run, tape)  # type: ignore[arg-type]

        def computed(tokens: mx.array, layers: list[object]) -> mx.array:
            if answering:
                raise RuntimeError("[malloc] Unable to allocate 12 bytes.")
            return checked(tokens, layers)

        return computed

    def never(*arguments: object) -> object:
        while True:
            time.sleep(60)

    if ODD == "draws":
        patch.object(group, "agreement", lambda token, ranks: agreement(token + 1, ranks)).start()
    elif ODD == "token":
        patch.object(group, "agreement", agreed).start()
    elif ODD == "position":
        patch.object(rank_world, "_position", elsewhere).start()
    elif ODD == "memory":
        patch.object(rank_world, "checked_forward", without_memory).start()
    elif ODD == "unwilling":
        patch.object(group, "join", never).start()


def _watch(own: Follower) -> None:
    watch(own)
    _patch()


watch = Follower.watch
patch.object(Follower, "watch", _watch).start()

if __name__ == "__main__":
    run_follower(sys.argv[1:])
