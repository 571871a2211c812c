"""`mlx-runner follow`: lets leaders in, one at a time, and starts a process for each load. It imports no MLX."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import NoReturn

from runner.errors import RankError, RunnerError
from runner.logs import Log
from runner.ranks.handshake import ProvedLeader, read_secret
from runner.ranks.link import how_it_ended, start_follower
from runner.settings import FollowSettings

log = Log(__name__)
_MOST_UNPROVED = 4
"""The most connections that have proved nothing yet. Another one ends the oldest, so strangers keep nobody out."""
_PATIENCE_S = 5.0
"""The grace period for the last load's process to exit: hosts start the next leader at once."""
_SHORTAGE_S = 0.1


class _Ended(BaseException):
    """Raised on SIGTERM or SIGINT."""


class Service:
    """Follows one leader at a time. Each connection has a thread; everything is started and ended on that of `run`."""

    def __init__(self, secret: bytes, models_dir: Path, log_level: int) -> None:
        self._secret = secret
        self._models_dir = models_dir
        self._log_level = log_level
        self._turn = threading.Lock()
        """Held by the thread that follows."""
        self._leader = ""
        self._state = threading.Lock()
        """Held for a moment around each use of the following."""
        self._unproved: dict[socket.socket, None] = {}  # in the order of their arrival
        self._process: Popen[bytes] | None = None
        self._ending = False

    def run(self, listener: socket.socket) -> NoReturn:
        """Accepts connections, for ever."""
        address, port = listener.getsockname()
        log.info("waiting for leaders", address=f"{address}:{port}")
        while True:
            try:
                connection, (host, port) = listener.accept()
                self._let_in(connection, f"{host}:{port}")
            except (OSError, RuntimeError) as error:  # a client that has left already; no more files, or threads
                log.warning("a connection is lost", why=str(error))
                time.sleep(_SHORTAGE_S)

    def end(self) -> None:
        """Ends the process that follows, if there is one, and lets no other start."""
        with self._state:
            self._ending = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _let_in(self, connection: socket.socket, peer: str) -> None:
        with self._state:
            if len(self._unproved) >= _MOST_UNPROVED:
                oldest = next(iter(self._unproved))
                del self._unproved[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._unproved[connection] = None
        threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        with connection:
            try:
                self._follow(self._proved(connection), connection, peer)
            except RankError as error:
                log.warning("a connection is refused", peer=peer, why=str(error))
            except Exception:
                log.exception("a load could not begin", leader=peer)

    def _proved(self, connection: socket.socket) -> ProvedLeader:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return ProvedLeader(connection, self._secret)
        finally:
            with self._state:
                self._unproved.pop(connection, None)

    def _follow(self, leader: ProvedLeader, connection: socket.socket, peer: str) -> None:
        if not self._turn.acquire(timeout=_PATIENCE_S):
            leader.answer(busy := f"busy with the leader at {self._leader}")
            raise RankError(busy)
        try:
            self._leader = peer
            leader.answer()
            with self._state:
                if self._ending:
                    return
                process = self._process = start_follower(connection, self._models_dir, self._log_level)
            connection.close()  # only the process holds it now, so that they end together
            log.info("a load begins", leader=peer, process=process.pid)
            status = process.wait()
            log.info("a load has ended", leader=peer, process=process.pid, status=how_it_ended(status))
        finally:
            self._process = None
            self._turn.release()


def follow(settings: FollowSettings) -> NoReturn:
    """Lets leaders in until a signal ends the process and its followers. Raises RunnerError for a secret or an address
    that cannot be used."""
    service = Service(read_secret(settings.secret_file), settings.models_dir, settings.log_level)
    with _listener(settings.address, settings.port) as listener:
        received = signal.SIGTERM

        def end(number: int, _: object) -> NoReturn:
            nonlocal received
            received = signal.Signals(number)
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_IGN)
            raise _Ended

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        try:
            service.run(listener)
        except _Ended:
            pass
        finally:
            service.end()
    signal.signal(received, signal.SIG_DFL)
    os.kill(os.getpid(), received)  # so that its sender sees that it was the cause
    raise AssertionError("this signal ends the process")


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise RunnerError(f"listen tcp {address}:{port}: bind: {reason}; name an address of this machine") from error
    return listener
