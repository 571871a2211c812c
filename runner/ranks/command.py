"""`mlx-runner follow`: computes parts of models of other machines."""

import os
import signal
import socket
from typing import NoReturn

from runner.errors import RunnerError
from runner.ranks.handshake import read_secret
from runner.ranks.service import Service
from runner.settings import FollowSettings


class _Ended(BaseException):
    """A signal asks for the end."""


def follow(settings: FollowSettings) -> NoReturn:
    """Lets leaders in until a signal ends the process, and what it has started. Raises RunnerError for a secret or an
    address that cannot be used."""
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
    os.kill(os.getpid(), received)  # whoever sent it sees that it was the cause
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
