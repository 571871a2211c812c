"""The text of flags and of Ollama's variables, converted into numbers, sizes, paths and addresses, or refused.

A wrong flag raises UsageError. A wrong variable of Ollama's does not: it speaks to every runner of the host, and Ollama
goes on with its default too. Such a variable is ignored with a warning for the log.
"""

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from runner import logs
from runner.errors import UsageError
from runner.ranks.handshake import Address, parse_address, parse_listen_address
from runner.settings import DEFAULT_PARALLEL, DRAFT_AUTO, DRAFT_OFF, MOST_PARALLEL, MOST_RANKS
from runner.sizes import Bound, parse_bound

_LOG_LEVELS = {
    "trace": logs.TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
_OLLAMA_KV_BITS = {"q8_0": 8, "q4_0": 4, "f16": None, "bf16": None, "f32": None, "": None}
_MAKE_ONE = "name a file that all machines have (umask 077; openssl rand -hex 32 > FILE)"
_SERVICE_STORE = Path("/usr/share/ollama/.ollama/models")  # where Ollama's Linux installer puts it

Values = Mapping[str, str]
"""The text of each flag, by the flag's name."""
Environ = Mapping[str, str]


def whole_number(values: Values, name: str, least: int, most: int) -> int:
    """Returns the flag's number. Raises UsageError unless it is a whole one from `least` to `most`."""
    try:
        number = int(values[name])
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise UsageError(f"--{name} {values[name]}: give a whole number from {least} to {most}")
    return number


def memory_bound(values: Values, name: str) -> Bound:
    """Returns the flag's amount of memory."""
    try:
        return parse_bound(values[name])
    except ValueError as error:
        raise UsageError(
            f"--{name} {values[name]}: give bytes (123456, 512MiB, 8G), a share (25%), or both (8G,25%)"
        ) from error


def disk_directory(values: Values) -> Path | None:
    """Returns the directory of the disk cache, absolute; None without one. Raises UsageError if somebody else could put
    files into it."""
    given = values.get("disk-cache")
    if not given:
        return None
    path = Path(os.path.abspath(os.path.expanduser(given)))  # noqa: PTH100, PTH111 - as for the store
    try:
        found = path.stat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise UsageError(f"--disk-cache {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"--disk-cache {path}: not a directory")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UsageError(f"--disk-cache {path}: others may write to it; name a directory of your own (chmod 700)")
    return path


def context_tokens(values: Values) -> int | None:
    """Returns the context limit: at least two tokens, one of a prompt and one of an answer."""
    return whole_number(values, "context", 2, 1 << 30) if "context" in values else None


def blas_threads(values: Values) -> int | None:
    """Returns the number of threads of the BLAS; None if it is for the runner to choose."""
    return None if values["blas-threads"] == "auto" else whole_number(values, "blas-threads", 1, 1024)


def ranks(values: Values) -> int:
    """Returns the number of processes on this machine that share the model. Raises UsageError for what several of them
    cannot do."""
    number = whole_number(values, "ranks", 1, MOST_RANKS)
    if number > 1:
        _check_ranks(f"--ranks {number}", values)
    return number


def followers(values: Values) -> tuple[str, ...]:
    """Returns HOST:PORT of the other machines that share the model. Raises UsageError as `ranks`, and without a
    secret."""
    given = tuple(address.strip() for address in values.get("followers", "").split(",") if address.strip())
    if not given:
        return ()
    for address in given:
        try:
            parse_address(address)
        except ValueError as error:
            raise UsageError(f"--followers {error}") from None
    if len(set(given)) < len(given) or len(given) >= MOST_RANKS:
        raise UsageError(f"--followers {values['followers']}: give at most {MOST_RANKS - 1} addresses, each once")
    if values["ranks"] != "1":
        raise UsageError("--followers excludes --ranks: each machine computes one rank")
    if not values.get("secret-file"):
        raise UsageError(f"--followers needs --secret-file: {_MAKE_ONE}")
    _check_ranks("--followers", values)
    return given


def _check_ranks(flag: str, values: Values) -> None:
    for name in ("disk-cache", "record"):
        if values.get(name):
            raise UsageError(f"{flag} excludes --{name}: leave out one of them")
    if values["draft"] not in (DRAFT_AUTO, DRAFT_OFF):
        raise UsageError(f"{flag} excludes draft models: leave out --draft {values['draft']}")


def secret_file(values: Values) -> Path | None:
    """Returns the path of the secret."""
    given = values.get("secret-file")
    return Path(os.path.expanduser(given)) if given else None  # noqa: PTH111 - as for the store


def listen_address(values: Values) -> Address:
    """Returns the address on which leaders reach this machine."""
    try:
        return parse_listen_address(values["listen"])
    except KeyError:
        raise UsageError("--listen is missing: give the address of this machine on one network, and a port") from None
    except ValueError as error:
        raise UsageError(f"--listen {error}") from None


def needed_secret_file(values: Values) -> Path:
    """Returns the path of the secret. Raises UsageError without one."""
    if (path := secret_file(values)) is None:
        raise UsageError(f"--secret-file is missing: {_MAKE_ONE}")
    return path


def log_level(values: Values, environ: Environ) -> int:
    """Returns the level of `--log-level`, else that of OLLAMA_DEBUG."""
    given = values.get("log-level")
    return _LOG_LEVELS[given] if given else logs.level_from_ollama(environ.get("OLLAMA_DEBUG", ""))


def kv_bits(values: Values, environ: Environ) -> tuple[int | None, tuple[str, ...]]:
    """Returns the bits of keys and values (None: not quantized), and warnings about OLLAMA_KV_CACHE_TYPE."""
    if given := values.get("kv-bits"):
        return (None if given == "off" else int(given)), ()
    kind = environ.get("OLLAMA_KV_CACHE_TYPE", "").strip(" \t\"'").lower()
    if kind in _OLLAMA_KV_BITS:
        return _OLLAMA_KV_BITS[kind], ()
    known = ", ".join(filter(None, _OLLAMA_KV_BITS))
    return None, (f"OLLAMA_KV_CACHE_TYPE={kind} is none of {known}: keys and values are not quantized",)


def parallel(values: Values, environ: Environ) -> tuple[int, tuple[str, ...]]:
    """Returns the number of requests that run at once, and warnings about OLLAMA_NUM_PARALLEL."""
    if "parallel" in values:
        return whole_number(values, "parallel", 1, MOST_PARALLEL), ()
    wanted = environ.get("OLLAMA_NUM_PARALLEL", "").strip(" \t\"'")
    if not wanted.strip("0"):  # Ollama's own choice
        return DEFAULT_PARALLEL, ()
    if not (wanted.isascii() and wanted.isdigit()):
        warning = f"OLLAMA_NUM_PARALLEL={wanted} is not a whole number: {DEFAULT_PARALLEL} requests run at once"
        return DEFAULT_PARALLEL, (warning,)
    number = int(wanted) if len(wanted) < 20 else MOST_PARALLEL + 1
    if number > MOST_PARALLEL:
        return MOST_PARALLEL, (f"OLLAMA_NUM_PARALLEL={wanted}: at most {MOST_PARALLEL} requests run at once",)
    return number, ()


def models_dir(given: str | None, environ: Environ) -> Path:
    """Returns the Ollama store: `given`, else OLLAMA_MODELS, else the user's, else that of the Linux service."""
    if given:
        return Path(os.path.expanduser(given))  # noqa: PTH111 - a shell leaves `--models-dir=~/x` as it is
    named = environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    if named:
        return Path(named)
    # It stays `~` for a user without HOME and without an entry in the system's list, where Path.home() raises.
    home = Path(environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111
    store = home / ".ollama" / "models"
    if not home.is_absolute():
        return _SERVICE_STORE
    # Path.is_dir would raise where the store of a service is closed to other users.
    return _SERVICE_STORE if not os.path.isdir(store) and os.path.isdir(_SERVICE_STORE) else store  # noqa: PTH112


def runner_url(values: Values) -> str:
    """Returns the URL of the runner that `URL`, which may be a port alone, or `--port` names."""
    given = values.get("url", "")
    if not given and "port" not in values:
        raise UsageError("name a runner: mlx-runner top --port N; its log shows the port (`listening url=...`)")
    if not given or given.isdecimal():
        return f"http://127.0.0.1:{whole_number({'port': given or values['port']}, 'port', 1, 65535)}"
    try:
        parts = urlsplit(given if "//" in given else f"http://{given}")
        good = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{given}: a runner's address looks like http://127.0.0.1:11500")
    return f"http://{parts.netloc}"
