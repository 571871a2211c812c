"""The process of a follower: `python -m runner.ranks.follower DESCRIPTOR STORE LEVEL`.

DESCRIPTOR is a connection to the leader that both sides trust, STORE the directory of Ollama's models, LEVEL the log
level. The process loads its part of the model, runs the leader's slices, and ends when the leader ends.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from socket import socket
from typing import TYPE_CHECKING, NoReturn

import msgspec

from protocol.stats import RankCounts
from runner import cpu, logs
from runner.errors import RankError, RunnerError
from runner.logs import Log
from runner.model import OpenedModel, open_model
from runner.ranks.frames import FrameKind, Go, Here, Join, Loaded, RankFailed
from runner.ranks.link import Link, LinkClosedError, Peer, Watch
from runner.settings import Settings, context_limit
from runner.tape.file import differences, settings_of
from runner.tape.tape import DiffersError
from runner.tokenizer import open_tokenizer
from runner.wings import chooser

if TYPE_CHECKING:
    import mlx.core as mx

log = Log(__name__)
_JOIN_S = 60.0
_MOST_TEXT = 4000
_MAY_DIFFER = ("device", "blas", "kernels")
"""Fields of `Identity` in which ranks may differ. Such ranks round differently, but all use the leader's tokens."""


class Follower:
    """A rank that follows the leader. Owner: the engine thread."""

    group: "mx.distributed.Group"

    def __init__(self, link: Link) -> None:
        self._link = link
        self.frames: SimpleQueue[bytes] = SimpleQueue()
        """The parts of the leader's tape that have arrived."""

    def watch(self) -> None:
        """Collects the tape as it arrives, and ends the process when the leader ends. This imports MLX."""
        from mlx.core import get_active_memory

        def take(_: Peer, kind: FrameKind, body: bytes) -> None:
            if kind is FrameKind.TAPE:
                self.frames.put(body)

        def gone(_: Peer, why: RunnerError | None) -> NoReturn:
            log.info("a follower ends", why=str(why or "its leader has ended"))
            os._exit(0)

        Watch([Peer("the leader", self._link)], take, gone, get_active_memory).start()

    def broadcast(self, token: "mx.array") -> "mx.array":
        from runner.ranks.group import agreement

        return agreement(token, self.group)

    def least_budget(self, budget_bytes: int) -> int:
        from mlx.core import get_active_memory

        weights_bytes = get_active_memory()
        self._link.send(FrameKind.LOADED, Loaded(weights_bytes, max(0, budget_bytes - weights_bytes)))
        return budget_bytes

    def counts(self) -> RankCounts:
        return RankCounts()

    def await_cause(self, error: BaseException) -> None:
        """Does nothing: the leader finds the cause of an error."""

    def fail(self, error: Exception) -> NoReturn:
        raise RankError(logs.exception_line(error)) from error


def follow_leader(link: Link, models_dir: Path, log_level: int) -> NoReturn:
    """Follows the leader at the other end of `link`. Raises RunnerError if this rank cannot begin or cannot
    continue."""
    join = link.expect(FrameKind.JOIN, Join, _JOIN_S)
    settings = msgspec.structs.replace(
        settings_of(join.header),
        models_dir=models_dir,
        log_level=log_level,
        ranks=join.ranks,
        ranks_here=join.ranks_here,
    )
    if not link.is_local and settings.blas not in ("auto", "off"):
        raise RankError(f"--blas {settings.blas} names a library of the leader's machine: use auto or off")
    logs.mark(rank=join.rank)
    cpu.preload(settings.blas, settings.blas_threads, settings.kernels)  # before MLX is imported
    from runner.ranks import group

    model = open_model(settings.model, models_dir, chooser(settings))
    model = model._replace(context_length=context_limit(model.context_length, settings.context_tokens))
    notes = []
    for what, there, here in differences(join.header, settings, model):
        notes.append(note := f"{what}: the leader has {there}, this rank {here}")
        if what not in _MAY_DIFFER:
            raise RankError(note)
    follower = Follower(link)
    link.send(FrameKind.HERE, Here(group.free_address(link.host), notes))
    addresses = link.expect(FrameKind.GO, Go, _JOIN_S).addresses
    follower.watch()
    follower.group = group.join(join.rank, addresses, join.backend, {link.fileno(): "the leader"})
    group.measure(follower.group)
    _run(follower, settings, model)


def _run(follower: Follower, settings: Settings, model: OpenedModel) -> NoReturn:
    """Loads the model and runs slices, as `Engine` does in the leader's process."""
    from runner.ranks.rank_world import RankWorld, follower_tape
    from runner.tape.replay import Replay, build_replayed

    tokenizer = open_tokenizer(model.file, merge_eos=not model.checkpoint.from_store)
    tape = follower_tape(follower.frames)
    replay = Replay(tape, model.vocab_size or tokenizer.vocab_size)
    parts = build_replayed(settings, model, tokenizer, RankWorld(tape, replay.turns, follower))
    done = replay.run(parts.scheduler, parts.formats.replayed, lambda *_: None)
    raise RankError(f"the ranks disagree: {done.difference}")


def run_follower(words: Sequence[str]) -> NoReturn:
    """Runs a follower's process. `words` are DESCRIPTOR, STORE and LEVEL."""
    descriptor, models_dir, level = words
    logs.start(int(level))
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager signals every process
        signal.signal(number, signal.SIG_IGN)  # a follower ends when its leader ends
    link = Link(socket(fileno=int(descriptor)))
    try:
        follow_leader(link, Path(models_dir), int(level))
    except LinkClosedError:
        os._exit(0)  # no fault: the leader has ended
    except RunnerError as error:
        text, cause = str(error), logs.cause_of(error)
    except DiffersError as error:
        text, cause = f"the ranks disagree: {error}", error
    except BaseException as error:
        log.exception("a follower died")
        text, cause = logs.exception_line(error), error
    try:
        link.send(FrameKind.FAILED, RankFailed(text[:_MOST_TEXT], logs.lacks_memory(cause)))
    finally:
        os._exit(1)


if __name__ == "__main__":
    run_follower(sys.argv[1:])
