"""The leader: starts followers, checks that all ranks are alike, joins them, and ends them all if one of them fails."""

import os
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, NoReturn, TypeVar

from protocol.stats import Rank, RankCounts
from runner import logs
from runner.engine.events import Outbox
from runner.engine.ranks.followers import FollowerPeer, start_followers, visible_device
from runner.engine.ranks.grammar import RankGrammar
from runner.engine.ranks.link import BEAT_S, Link, LinkClosedError, decoded
from runner.engine.ranks.messages import Go, Here, Join, Kind, Loaded
from runner.engine.ranks.tapes import LeaderTape, Links
from runner.engine.ranks.watch import Peer, Watch
from runner.engine.tape.recording import Recording
from runner.errors import ComputeError, ModelError, RankError, RunnerError
from runner.logs import Log
from runner.model import OpenedModel
from runner.settings import Settings

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.engine.tape.recorder import Recorder

Answer = TypeVar("Answer")

log = Log(__name__)
_HERE_S = 60.0
"""A follower on this machine imports MLX first, which takes long on a busy one."""
_CAUSE_S, _MOMENT_S = 2.0, 0.1


class Leader:
    """Rank 0. Owner: the engine thread."""

    group: "mx.distributed.Group"

    def __init__(self, settings: Settings) -> None:
        """Starts the followers, or reaches them. Raises RankError for one that cannot be reached."""
        os.environ |= visible_device(0)
        self.tape: Recorder | None = None
        self.followers = start_followers(settings)
        self._loaded: SimpleQueue[Loaded] = SimpleQueue()
        self._ending = Event()
        self._closing = False
        self._watch = Watch(self.followers, self._take, self._gone, self._memory)

    @property
    def links(self) -> list[Link]:
        """The links to all followers."""
        return [follower.link for follower in self.followers]

    def join(self, settings: Settings, model: OpenedModel) -> None:
        """Joins all ranks. Raises RankError if one of them does not come, or differs from this one."""
        from runner.engine.ranks import group
        from runner.engine.tape.header import header_of

        self._backend = backend = group.backend()
        header = header_of(settings, model)
        for rank, follower in enumerate(self.followers, start=1):
            join = Join(rank, settings.ranks, settings.ranks_here, backend, header)
            self._ask(follower, partial(Link.send, kind=Kind.JOIN, message=join))
        addresses = [group.free_address(self.followers[-1].link.host)]  # for the last rank, which closes the ring
        for follower in self.followers:
            here = self._ask(follower, lambda link: link.expect(Kind.HERE, Here, _HERE_S))
            addresses.append(here.address)
            for note in here.notes:
                log.warning("ranks differ", rank=follower.name, what=note)
        self._watch.start()
        for follower in self.followers:
            self._ask(follower, lambda link: link.send(Kind.GO, Go(addresses)))
        peers = {follower.link.fileno(): follower.name for follower in self.followers}
        self.group = group.join(0, addresses, backend, peers)
        try:
            self._speed = group.measure(self.group)
        except Exception as error:
            self.fail(error)
        log.info("ranks are joined", ranks=settings.ranks, backend=backend, **self._speed._asdict())

    def agree(self, token: "mx.array") -> "mx.array":
        from runner.engine.ranks.group import agreement

        if self.tape is not None:
            self.tape.flush()  # followers need it to come to the same place
        return agreement(token, self.group)

    def least_budget(self, budget_bytes: int) -> int:
        from mlx.core import get_active_memory

        room = budget_bytes - (weights_bytes := get_active_memory())
        for _ in self.followers:
            room = min(room, self._loaded.get().room_bytes)
        return weights_bytes + max(0, room)

    def counts(self) -> RankCounts:
        members = [Rank(rank=0, name="rank 0", memory_bytes=self._memory())]
        for rank, follower in enumerate(self.followers, start=1):
            members.append(Rank(rank=rank, name=follower.name, memory_bytes=follower.memory_bytes))
        latency_us, gbit_s = self._speed
        sent = self.links[0].nbytes
        return RankCounts(backend=self._backend, latency_us=latency_us, gbit_s=gbit_s, tape_bytes=sent, members=members)

    def await_cause(self, error: BaseException) -> None:
        own = isinstance(error, RankError | ModelError) and not isinstance(error, ComputeError)
        if not own and not logs.lacks_memory(error) and self._ending.wait(_CAUSE_S):
            Event().wait()  # for the watch to end the process
        self._closing = True
        for (
            follower
        ) in self.followers:  # else each of them tells that its leader has ended, after the leader's own line
            follower.end(0.0)

    def fail(self, error: Exception) -> NoReturn:
        self.await_cause(error)
        raise RankError(f"rank 0: {logs.error_line(error)}") from error

    def _ask(self, follower: FollowerPeer, act: Callable[[Link], Answer]) -> Answer:
        """Returns what `act` returns. Raises RankError, with the name of the rank, for what goes wrong."""
        try:
            return act(follower.link)
        except LinkClosedError:
            raise RankError(f"{follower.name} ended: {follower.end()}") from None
        except (RunnerError, TimeoutError) as error:
            raise RankError(f"{follower.name}: {error}") from error

    def _take(self, _: Peer, kind: Kind, body: bytes) -> None:
        if kind is Kind.LOADED:
            self._loaded.put(decoded(body, Loaded))

    def _gone(self, peer: Peer, why: str) -> NoReturn:
        """Ends all ranks. Runs on the thread of the watch."""
        if self._closing:
            Event().wait()  # for the engine to end the process
        self._ending.set()
        ends = {each.name: each.end(BEAT_S if each is peer else _MOMENT_S) for each in self.followers}
        killed = [name for name, end in ends.items() if end.startswith("killed")]
        if killed and peer.name not in killed:  # what this one tells is what the end of that one did to it
            name, why = killed[0], ""
        else:
            name = peer.name
        error = RankError(f"{name}: {why}" if why else f"{name} ended: {ends[name]}")
        logs.die(error, apart=True)  # MLX's ring writes of lost peers

    @staticmethod
    def _memory() -> int:
        from mlx.core import get_active_memory

        return get_active_memory()


def lead(settings: Settings, model: OpenedModel, outbox: Outbox) -> tuple[Leader, Recording]:
    """Starts the followers and joins them. Returns the leader and what it does beside its slices. Raises RankError if
    the ranks cannot begin."""
    from runner.model.weights.split import split

    if fault := split(model, settings.ranks).fault:
        raise RankError(fault)
    if model.has_vision:
        log.info("pictures are refused", why="several ranks read text alone")
    leader = Leader(settings)
    leader.join(settings, model)
    leader.tape = LeaderTape(Links(leader.links))
    return leader, Recording(leader.tape, outbox, RankGrammar)
