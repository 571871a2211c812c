"""The followers, as their leader sees them: processes of its own, or on other machines."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

from runner.engine.ranks.addresses import Address, parse_address, unfit
from runner.engine.ranks.handshake import DEADLINE_S, prove_to_service
from runner.engine.ranks.link import BEAT_S, Link
from runner.engine.ranks.process import how_it_ended, start_follower
from runner.engine.ranks.secret import read_secret
from runner.engine.ranks.watch import Peer
from runner.errors import RankError
from runner.settings import Settings


class LocalFollower(Peer):
    """A follower on this machine."""

    def __init__(self, rank: int, settings: Settings) -> None:
        """Starts the process."""
        ours, theirs = socket.socketpair()
        with theirs:
            environ = os.environ | visible_device(rank)
            self.process = start_follower(theirs, settings.models_dir, settings.log_level, environ)
        super().__init__(f"rank {rank} (process {self.process.pid})", Link(ours))

    def end(self, patience_s: float = BEAT_S) -> str:
        """Ends the process if it does not end by itself, and returns how it ended if it did. It writes no more then."""
        with suppress(TimeoutExpired):
            return how_it_ended(self.process.wait(patience_s))
        self.process.kill()
        with suppress(TimeoutExpired):  # it may be within a call of a driver
            self.process.wait(BEAT_S)
        return "its connection was closed"


class RemoteFollower(Peer):
    """A follower on another machine, which the service there (`mlx-runner follow`) has started."""

    def __init__(self, rank: int, address: str, secret: bytes) -> None:
        """Connects. Raises RankError if there is no such service, or if it will not follow."""
        name = f"rank {rank} ({address})"
        try:
            connection = _connect(parse_address(address))
            prove_to_service(connection, secret)
        except RankError as error:
            raise RankError(f"{name}: {error}") from error
        super().__init__(name, Link(connection))

    def end(self, patience_s: float = 0.0) -> str:  # noqa: ARG002 - as of a process here
        """Returns where to read how it ended. It ends by itself when the connection does."""
        return "the log of `mlx-runner follow` there says why"


FollowerPeer = LocalFollower | RemoteFollower


def start_followers(settings: Settings) -> list[FollowerPeer]:
    """Returns all followers, of rank 1 and up. Raises RankError for one that cannot be reached, and RunnerError for a
    file of the secret that cannot be used."""
    if not settings.followers:
        return [LocalFollower(rank, settings) for rank in range(1, settings.ranks)]
    assert settings.secret_file is not None
    secret = read_secret(settings.secret_file)
    return [RemoteFollower(rank, address, secret) for rank, address in enumerate(settings.followers, start=1)]


def visible_device(rank: int) -> dict[str, str]:
    """Returns the variable that gives a rank a GPU of its own, on a machine with GPUs of NVIDIA's; else nothing."""
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
