"""The command `mlx-runner follow`: accepts leaders, one at a time, with a process for each load. Imports no MLX."""

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
"""The most open connections without a proof. A further one closes the oldest, so strangers cannot keep leaders out."""
_PATIENCE_S = 5.0
"""The time that the process of the last load gets to exit, because hosts start the next leader immediately."""
_SHORTAGE_S = 0.1


class _Ended(BaseException):
    """An exception that the handler of SIGTERM and SIGINT raises, to leave `run`."""


class Service:
    """Follows one leader at a time. Each connection has a thread, which starts the process that follows the leader."""

    def __init__(self, secret: bytes, models_dir: Path, log_level: int) -> None:
        self._secret = secret
        self._models_dir = models_dir
        self._log_level = log_level
        self._turn = threading.Lock()
        """The lock of the thread that follows a leader."""
        self._leader = ""
        self._state = threading.Lock()
        """The lock around each use of the following attributes, held for a moment only."""
        self._unproved: dict[socket.socket, None] = {}  # in the order of their arrival
        self._process: Popen[bytes] | None = None
        self._ending = False

    def run(self, listener: socket.socket) -> NoReturn:
        """Accepts connections until the process ends."""
        address, port = listener.getsockname()
        log.info("waiting for leaders", address=f"{address}:{port}")
        while True:
            try:
                connection, (host, port) = listener.accept()
                self._let_in(connection, f"{host}:{port}")
            except (OSError, RuntimeError) as error:  # the client has left, or no descriptors or threads are free
                log.warning("a connection is lost", why=str(error))
                time.sleep(_SHORTAGE_S)

    def end(self) -> None:
        """Ends the process that follows a leader, if there is one, and prevents the start of another."""
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
                    oldest.shutdown(socket.SHUT_RDWR)  # the connection's own thread closes it
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
            connection.close()  # now only the process holds the connection, so both end together
            log.info("a load begins", leader=peer, process=process.pid)
            status = process.wait()
            log.info("a load has ended", leader=peer, process=process.pid, status=how_it_ended(status))
        finally:
            self._process = None
            self._turn.release()


def follow(settings: FollowSettings) -> NoReturn:
    """Accepts leaders until a signal ends this process and its followers. Raises RunnerError for a secret or an address
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
    os.kill(os.getpid(), received)  # so that the sender sees that the signal ended the process
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
