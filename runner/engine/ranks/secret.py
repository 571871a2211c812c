"""The secret that all machines of a model share, in a file."""

import os
import stat
from pathlib import Path

from runner.errors import RunnerError

_LEAST_BYTES, _MOST_BYTES = 16, 4096


def read_secret(path: Path) -> bytes:
    """Returns the secret in the file, without white space around it. Raises RunnerError, with what to do, for a file
    that cannot be read, that another user may read, or whose secret is too short."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _fault(path, "not a file")
            if found.st_uid != os.geteuid():
                raise _fault(path, "it belongs to another user: copy it to a file of your own")
            if found.st_mode & 0o077:
                raise _fault(path, f"other users may read or change it: chmod 600 {path}")
            secret = file.read(_MOST_BYTES + 1).strip()
    except FileNotFoundError:
        why = "no such file: make one (umask 077; openssl rand -hex 32 > FILE), and copy it to every machine"
        raise _fault(path, why) from None
    except OSError as error:
        raise _fault(path, str(error.strerror)) from error
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        why = f"a secret has {_LEAST_BYTES} to {_MOST_BYTES} bytes: make one with openssl rand -hex 32"
        raise _fault(path, why)
    return secret


def _fault(path: Path, why: str) -> RunnerError:
    return RunnerError(f"--secret-file {path}: {why}")
