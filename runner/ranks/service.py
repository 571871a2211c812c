"""Lets leaders in, one at a time, and starts a process for each load. Holds no model and imports no MLX."""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import NoReturn

from runner.errors import RankError
from runner.logs import Log
from runner.ranks.handshake import ProvedLeader
from runner.ranks.process import how_it_ended, start_follower

log = Log(__name__)
_MOST_UNPROVED = 4
"""Connections that have proved nothing yet. One more ends the oldest, so those that prove nothing keep nobody out."""
_PATIENCE_S = 5.0
"""For the process of the last leader, which ends a moment after it: hosts start the next one at once."""
_SHORTAGE_S = 0.1


class Service:
    """Follows one leader at a time. Each connection has a thread; everything is started and ended on that of `run`."""

    def __init__(self, secret: bytes, models_dir: Path, log_level: int) -> None:
        self._secret, self._models_dir, self._log_level = secret, models_dir, log_level
        self._turn = threading.Lock()
        """Held by the thread that follows."""
        self._leader = ""
        self._state = threading.Lock()
        """Held for moments, around what is below."""
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
        """Ends the process that follows, if there is one, and lets none start any more."""
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
