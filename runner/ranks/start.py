"""The leader: starts the followers, checks that all ranks are alike, joins them, and ends all if one fails."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from subprocess import TimeoutExpired
from threading import Event
from typing import TYPE_CHECKING, NoReturn, TypeVar

from protocol.stats import Rank, RankCounts
from runner import logs
from runner.addresses import Address, parse_address, unfit
from runner.engine.events import Outbox
from runner.errors import ComputeError, ModelError, RankError, RunnerError
from runner.logs import Log
from runner.model import OpenedModel
from runner.ranks.frames import FrameKind, Go, Here, Join, Loaded, decode_body
from runner.ranks.handshake import DEADLINE_S, prove_to_service, read_secret
from runner.ranks.link import BEAT_S, Link, LinkClosedError, Peer, Watch, how_it_ended, start_follower
from runner.ranks.rank_world import RankWorld, leader_tape
from runner.settings import Settings
from runner.tape.file import header_of
from runner.tape.recording import Recording

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.tape.tape import Recorder

log = Log(__name__)


class LocalFollower(Peer):
    """A follower on this machine."""

    def __init__(self, rank: int, settings: Settings) -> None:
        """Starts the follower's process."""
        ours, theirs = socket.socketpair()
        with theirs:
            environ = os.environ | visible_device(rank)
            self.process = start_follower(theirs, settings.models_dir, settings.log_level, environ)
        super().__init__(f"rank {rank} (process {self.process.pid})", Link(ours))

    def end(self, patience_s: float = BEAT_S) -> str:
        """Waits `patience_s` seconds for the end of the process, then kills it. Returns in words how it ended."""
        with suppress(TimeoutExpired):
            return how_it_ended(self.process.wait(patience_s))
        self.process.kill()
        with suppress(TimeoutExpired):  # the process may be in a call of a driver
            self.process.wait(BEAT_S)
        return "its connection was closed"


class RemoteFollower(Peer):
    """A follower on another machine, which the service there (`mlx-runner follow`) has started."""

    def __init__(self, rank: int, address: str, secret: bytes) -> None:
        """Connects to the service. Raises RankError if no service answers, or if it refuses to follow."""
        name = f"rank {rank} ({address})"
        try:
            connection = _connect(parse_address(address))
            prove_to_service(connection, secret)
        except RankError as error:
            raise RankError(f"{name}: {error}") from error
        super().__init__(name, Link(connection))

    def end(self, patience_s: float = 0.0) -> str:  # noqa: ARG002 - as for a local follower
        """Returns a hint at the log that tells how the follower ended. The follower ends with the connection."""
        return "the log of `mlx-runner follow` there says why"


FollowerPeer = LocalFollower | RemoteFollower


def start_followers(settings: Settings) -> list[FollowerPeer]:
    """Returns all followers, from rank 1 on. Raises RankError for a follower that cannot be reached, and RunnerError
    for a file of the secret that cannot be used."""
    if not settings.followers:
        return [LocalFollower(rank, settings) for rank in range(1, settings.ranks)]
    assert settings.secret_file is not None
    secret = read_secret(settings.secret_file)
    return [RemoteFollower(rank, address, secret) for rank, address in enumerate(settings.followers, start=1)]


def visible_device(rank: int) -> dict[str, str]:
    """Returns the variable that gives a rank its own GPU, on a machine with NVIDIA GPUs; else an empty dict."""
    if not Path("/dev/nvidiactl").exists():
        return {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": [*filter(None, devices.split(",")), *map(str, range(rank + 1))][rank]}


def _connect(address: Address) -> socket.socket:
    try:
        host = socket.gethostbyname(address.host)
        if why := unfit(host):
            raise RankError(f"{host}: {why}")
        connection = socket.create_connection((host, address.port), DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (socket.gaierror, UnicodeError) as error:
        raise RankError(f"no machine of this name: {error}") from error
    except TimeoutError as error:
        raise RankError(
            f"no answer for {DEADLINE_S:.0f} s; is `mlx-runner follow` running there, and does no firewall stop it?"
        ) from error
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise RankError(f"{reason}; is `mlx-runner follow` running there?") from error
    return connection


Answer = TypeVar("Answer")

_HERE_S = 60.0
"""The longest wait for a follower's first answer. A follower imports MLX first, which takes long on a busy machine."""
_CAUSE_S, _MOMENT_S = 2.0, 0.1


class Leader:
    """Rank 0, which leads the other ranks. Owner: the engine thread."""

    group: "mx.distributed.Group"

    def __init__(self, settings: Settings) -> None:
        """Starts local followers, or connects to remote ones. Raises RankError for one that cannot be reached."""
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
        """Joins all ranks. Raises RankError if a follower does not answer, or differs from the leader."""
        from runner.ranks import group

        self._backend = backend = group.backend()
        header = header_of(settings, model)
        for rank, follower in enumerate(self.followers, start=1):
            join = Join(rank, settings.ranks, settings.ranks_here, backend, header)
            self._ask(follower, partial(Link.send, kind=FrameKind.JOIN, message=join))
        addresses = [group.free_address(self.followers[-1].link.host)]  # as the last rank reaches it: a ring
        for follower in self.followers:
            here = self._ask(follower, lambda link: link.expect(FrameKind.HERE, Here, _HERE_S))
            addresses.append(here.address)
            for note in here.notes:
                log.warning("ranks differ", rank=follower.name, what=note)
        self._watch.start()
        for follower in self.followers:
            self._ask(follower, lambda link: link.send(FrameKind.GO, Go(addresses)))
        peers = {follower.link.fileno(): follower.name for follower in self.followers}
        self.group = group.join(0, addresses, backend, peers)
        try:
            self._speed = group.measure(self.group)
        except Exception as error:
            self.fail(error)
        log.info("ranks are joined", ranks=settings.ranks, backend=backend, **self._speed._asdict())

    def broadcast(self, token: "mx.array") -> "mx.array":
        from runner.ranks.group import agreement

        if self.tape is not None:
            self.tape.flush()  # followers need its entries to reach this call
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
            Event().wait()  # waits until the watch ends the process
        self._closing = True
        for each in self.followers:  # else each would log the leader's end after its last line
            each.end(0.0)

    def fail(self, error: Exception) -> NoReturn:
        self.await_cause(error)
        raise RankError(f"rank 0: {logs.exception_line(error)}") from error

    def _ask(self, follower: FollowerPeer, act: Callable[[Link], Answer]) -> Answer:
        """Returns the result of `act` on the follower's link. Turns errors into RankError, with the follower's name."""
        try:
            return act(follower.link)
        except LinkClosedError:
            raise RankError(f"{follower.name} ended: {follower.end()}") from None
        except (RunnerError, TimeoutError) as error:
            raise RankError(f"{follower.name}: {error}") from error

    def _take(self, _: Peer, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.LOADED:
            self._loaded.put(decode_body(body, Loaded))

    def _gone(self, peer: Peer, why: RunnerError | None) -> NoReturn:
        """Ends all ranks after the loss of `peer`. Runs on the thread of the watch."""
        if self._closing:
            Event().wait()  # waits until the engine ends the process
        self._ending.set()
        ends = {each.name: each.end(BEAT_S if each is peer else _MOMENT_S) for each in self.followers}
        killed = [name for name, end in ends.items() if end.startswith("killed")]
        if killed and peer.name not in killed:  # the killed process is the cause
            name, why = killed[0], None
        else:
            name = peer.name
        end = RankError(f"{name}: {why}" if why else f"{name} ended: {ends[name]}")
        end.__cause__ = why
        logs.die(end)

    @staticmethod
    def _memory() -> int:
        from mlx.core import get_active_memory

        return get_active_memory()


def lead(settings: Settings, model: OpenedModel, outbox: Outbox) -> RankWorld:
    """Starts the followers and joins them. Returns the leader's world. Raises RankError if the ranks cannot begin."""
    from runner.ranks.split import split_fault

    if fault := split_fault(model, settings.ranks):
        raise RankError(fault)
    if model.has_vision or model.has_audio:
        log.info("pictures and sound are refused", why="several ranks read text alone")
    leader = Leader(settings)
    leader.join(settings, model)
    leader.tape = leader_tape(leader.links)
    return RankWorld(leader.tape, Recording(leader.tape, outbox), leader)
