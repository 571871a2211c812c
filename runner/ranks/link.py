"""The processes of followers, and the connections to them. A connection notices when the other side is gone."""

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from select import POLLIN, poll
from time import monotonic
from typing import NoReturn

import msgspec

from runner.errors import RunnerError
from runner.ranks.frames import Beat, Body, FrameKind, RankFailed, decode_body

BEAT_S = 1.0
"""The seconds between two beats."""
SILENCE_S = 10.0
"""A side that sends nothing for this many seconds counts as gone."""
_HEAD = struct.Struct("<IB")
_MOST_BYTES = 1 << 30


class LinkClosedError(RunnerError):
    """The other side is gone."""


class Link:
    """A connection that carries frames. Any thread may send; only one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._readable = poll()
        self._readable.register(connection, POLLIN)
        self._sending = threading.Lock()
        self._rest = b""  # the unsent rest of a beat
        self.nbytes = 0
        """The number of bytes sent so far."""
        self.writes = 0

    def fileno(self) -> int:
        """Returns the descriptor of the connection."""
        return self._socket.fileno()

    @property
    def is_local(self) -> bool:
        """True if the other side is a process on this machine, connected by a socket pair."""
        return self._socket.family == socket.AF_UNIX

    @property
    def host(self) -> str:
        """The address of this side at which the other side reaches it."""
        return "127.0.0.1" if self.is_local else self._socket.getsockname()[0]

    def send(self, kind: FrameKind, message: msgspec.Struct) -> None:
        """Sends a frame with `message` as its body. Raises LinkClosedError if the other side is gone."""
        self.send_bytes(kind, msgspec.msgpack.encode(message))

    def send_bytes(self, kind: FrameKind, body: bytes) -> None:
        """Sends a frame; waits while the other side does not read. Raises LinkClosedError if the other side is gone."""
        with self._sending:
            data = self._rest + _HEAD.pack(len(body), kind) + body
            self._rest = b""
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise LinkClosedError(f"the connection is gone: {error.strerror or error}") from error
            self.nbytes += len(data)
            self.writes += 1

    def beat(self, memory_bytes: int) -> None:
        """Sends a beat, unless another thread is sending: any frame is a sign of life. Never waits, never raises."""
        if self._sending.acquire(blocking=False):
            try:
                if not self._rest:
                    body = msgspec.msgpack.encode(Beat(memory_bytes))
                    self._rest = _HEAD.pack(len(body), FrameKind.BEAT) + body
                self._rest = self._rest[self._socket.send(self._rest, socket.MSG_DONTWAIT) :]
            except OSError:
                pass  # the receiving thread notices a lost connection
            finally:
                self._sending.release()

    def receive(self, seconds: float | None = None) -> tuple[FrameKind, bytes]:
        """Returns the next frame's kind and body. Raises LinkClosedError if the connection has ended, TimeoutError if
        nothing arrives for `seconds`, and RunnerError if the bytes are not a frame."""
        length, kind = _HEAD.unpack(self._exactly(_HEAD.size, seconds))
        if length > _MOST_BYTES or kind not in set(FrameKind):
            raise RunnerError("the other side does not speak the protocol of ranks")
        return FrameKind(kind), self._exactly(length, seconds)

    def expect(self, kind: FrameKind, body: type[Body], seconds: float) -> Body:
        """Returns the next message that is not a beat. Raises what `receive` raises, and RunnerError for a frame of
        another kind. The error of a failed follower has that follower's text."""
        found = FrameKind.BEAT
        while found is FrameKind.BEAT:
            found, data = self.receive(seconds)
        if found is FrameKind.FAILED:
            raise decode_body(data, RankFailed).error()
        if found is not kind:
            raise RunnerError(f"found {found.name} in place of {kind.name}")
        return decode_body(data, body)

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _exactly(self, count: int, seconds: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not self._readable.poll(None if seconds is None else seconds * 1000):
                raise TimeoutError(f"nothing came for {seconds:.0f} s")
            try:
                part = self._socket.recv(min(count - len(data), 1 << 20))
            except OSError as error:
                raise LinkClosedError(f"the connection is gone: {error.strerror or error}") from error
            if not part:
                raise LinkClosedError("the connection was closed")
            data += part
        return bytes(data)


class Peer:
    """The other side of a link."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        """The rank and the address of the peer, in words."""
        self.link = link
        self.memory_bytes = 0
        """The memory that MLX has in use at the peer, by the peer's last beat."""
        self.heard_s = monotonic()


class Watch:
    """Passes on the frames of peers, notices when a peer is gone, and sends each peer a beat every second. The thread
    of the watch never computes, so it is never late."""

    def __init__(
        self,
        peers: Sequence[Peer],
        take: Callable[[Peer, FrameKind, bytes], None],
        gone: Callable[[Peer, RunnerError | None], NoReturn],
        memory: Callable[[], int],
    ) -> None:
        """Calls `take` with each frame that is no beat, and `gone` once, with the reason why a peer is lost (None if
        its connection was closed). Both run on the watch's own thread. `memory` returns the bytes for the beats."""
        self._peers = peers
        self._take = take
        self._gone = gone
        self._memory = memory

    def start(self) -> None:
        """Starts the thread. From then on a silent peer counts as gone."""
        for peer in self._peers:
            peer.heard_s = monotonic()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def _run(self) -> None:
        readable = poll()
        peers = {peer.link.fileno(): peer for peer in self._peers}
        for descriptor in peers:
            readable.register(descriptor, POLLIN)
        beaten_s, looked_s = 0.0, monotonic()
        while True:
            for descriptor, _ in readable.poll(BEAT_S * 1000):
                self._receive(peers[descriptor])
            now_s = monotonic()
            slept_s, looked_s = max(0.0, now_s - looked_s - 2 * BEAT_S), now_s
            for peer in self._peers:  # if this process was stopped, its peers may have been stopped as well
                peer.heard_s += slept_s
            if now_s - beaten_s >= BEAT_S:
                beaten_s = now_s
                for peer in self._peers:
                    peer.link.beat(self._memory())
            silent = min(self._peers, key=lambda peer: peer.heard_s)
            if now_s - silent.heard_s > SILENCE_S:
                self._gone(silent, _silence())

    def _receive(self, peer: Peer) -> None:
        try:
            kind, body = peer.link.receive(SILENCE_S)
            peer.heard_s = monotonic()
            if kind is FrameKind.BEAT:
                peer.memory_bytes = decode_body(body, Beat).memory_bytes
            elif kind is FrameKind.FAILED:
                raise decode_body(body, RankFailed).error()
            else:
                self._take(peer, kind, body)
        except TimeoutError:
            self._gone(peer, _silence())
        except LinkClosedError:
            self._gone(peer, None)
        except RunnerError as error:
            self._gone(peer, error)


def _silence() -> RunnerError:
    return RunnerError(f"it sent nothing for {SILENCE_S:.0f} s")


def start_follower(
    connection: socket.socket, models_dir: Path, log_level: int, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process that follows the leader at the other end of `connection`, which both sides trust. `environ` is
    the environment of the process; None means that of this process."""
    descriptor = connection.fileno()
    words = (str(descriptor), str(models_dir), str(log_level))
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "runner.ranks.follower", *words],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env=environ,
    )


def how_it_ended(status: int) -> str:
    """Returns the exit status of a process, in words."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
