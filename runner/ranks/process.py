"""Starts the process of a follower."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from socket import socket


def start_follower(
    connection: socket, models_dir: Path, log_level: int, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process that follows the leader at the other end of the connection, in which both sides trust. `environ`
    is its environment, if not that of this process."""
    descriptor = connection.fileno()
    words = (str(descriptor), str(models_dir), str(log_level))
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", __name__.replace("process", "follower"), *words],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env=environ,
    )


def how_it_ended(status: int) -> str:
    """Returns the status of a process that has ended, in words."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
