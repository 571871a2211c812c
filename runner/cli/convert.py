"""Converts the text of flags, and of Ollama's variables, into the types of the settings' fields.

The type of a field decides how its flag is converted, except for the fields in `_ODD`. A wrong text of a flag raises
UsageError. A wrong text of one of Ollama's variables is ignored with a warning in the log. Ollama, which gives the
variable to all its runners, ignores it too.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from runner import logs
from runner.addresses import Address, parse_address, parse_listen_address
from runner.errors import UsageError
from runner.settings import (
    DEFAULT_PARALLEL,
    DRAFT_AUTO,
    DRAFT_OFF,
    MOST_PARALLEL,
    MOST_RANKS,
    Flag,
    FollowSettings,
    Settings,
    TopSettings,
    field_kind,
    flags_of,
)
from runner.sizes import Bound, parse_bound

_LOG_LEVELS = {
    "trace": logs.TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
GO_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), "on"),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), "off"),
}
_OLLAMA_KV_BITS = {"q8_0": 8, "q4_0": 4, "f16": None, "bf16": None, "f32": None, "": None}
MAKE_ONE = "name a file that all machines have (umask 077; openssl rand -hex 32 > FILE)"
_SERVICE_STORE = Path("/usr/share/ollama/.ollama/models")  # the store of the service that Ollama's installer makes

Values = Mapping[str, str]
"""Name of a flag or argument -> text."""


class Given(NamedTuple):
    """The texts of flags and environment variables for a command."""

    values: Values
    environ: Mapping[str, str]
    warnings: list[str]
    """Texts about ignored variables. Conversions append to this list."""
    variables: Set[str] = frozenset()
    """The names of flags whose text comes from an environment variable."""

    @contextmanager
    def naming(self, flag: Flag) -> Iterator[None]:
        """Turns a ValueError of the block into a UsageError that begins with the name of the flag or its variable."""
        try:
            yield
        except ValueError as error:
            start = f"{flag.variable}=" if flag.name in self.variables else f"--{flag.name} "
            raise UsageError(f"{start}{error}") from error


def fields_of(settings: type[msgspec.Struct], given: Given) -> dict[str, object]:
    """Returns field -> value for the fields that have a text or an entry in `_ODD`. Other fields keep defaults."""
    flags = flags_of(settings)
    fields: dict[str, object] = {}
    for field in msgspec.structs.fields(settings):
        flag = flags.get(field.name)
        if flag is None:
            continue
        with given.naming(flag):
            if odd := _ODD.get(field.name):
                fields[field.name] = odd(given)
            elif flag.name in given.values:
                fields[field.name] = _READ[field_kind(field)](flag, given.values[flag.name])
    return fields


def _whole_number(flag: Flag, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = flag.least - 1
    if not flag.least <= number <= flag.most:
        raise ValueError(f"{text}: give a whole number from {flag.least} to {flag.most}")
    return number


def _memory_bound(_: Flag, text: str) -> Bound:
    try:
        return parse_bound(text)
    except ValueError as error:
        raise ValueError(f"{text}: give bytes (123456, 512MiB, 8G), a share (25%), or both (8G,25%)") from error


_READ: Mapping[type, Callable[[Flag, str], object]] = {
    bool: lambda _, text: text == "on",
    int: _whole_number,
    float: lambda flag, text: _whole_number(flag, text) / 1000,  # milliseconds, as seconds
    str: lambda _, text: text,
    Path: lambda _, text: Path(text),
    Bound: _memory_bound,
}


def _expanded(text: str) -> Path:
    """Returns the path with the home directory in place of `~`. A shell does not replace it in `--models-dir=~/x`."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for a user without a home


def _disk_cache(given: Given) -> Path | None:
    """Returns the absolute path of the disk cache. Raises ValueError for a directory that other users may write to."""
    text = given.values.get("disk-cache")
    if not text:
        return None
    path = Path(os.path.abspath(_expanded(text)))  # noqa: PTH100 - symbolic links stay
    try:
        found = path.stat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{path}: not a directory")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(f"{path}: others may write to it; name a directory of your own (chmod 700)")
    return path


def blas_threads(values: Values) -> int | None:
    """Returns the number of BLAS threads, or None if the runner is to choose it. Raises ValueError."""
    return None if values["blas-threads"] == "auto" else _whole_number(_SERVER["blas_threads"], values["blas-threads"])


def _followers(given: Given) -> tuple[str, ...]:
    text = given.values.get("followers", "")
    found = tuple(address.strip() for address in text.split(",") if address.strip())
    for address in found:
        parse_address(address)
    if len(set(found)) < len(found) or len(found) >= MOST_RANKS:
        raise ValueError(f"{text}: give at most {MOST_RANKS - 1} addresses, each once")
    return found


def check_together(settings: Settings) -> None:
    """Raises UsageError if flags exclude each other, or if a flag lacks another that it needs."""
    if settings.ranks_here > 1:
        _check_ranks(f"--ranks {settings.ranks_here}", settings)
    if settings.followers:
        if settings.ranks_here > 1:
            raise UsageError("--followers excludes --ranks: each machine computes one rank")
        if settings.secret_file is None:
            raise UsageError(f"--followers needs --secret-file: {MAKE_ONE}")
        _check_ranks("--followers", settings)


def _check_ranks(flag: str, settings: Settings) -> None:
    for name, value in (("disk-cache", settings.disk_cache), ("record", settings.record)):
        if value:
            raise UsageError(f"{flag} excludes --{name}: leave out one of them")
    if settings.draft not in (DRAFT_AUTO, DRAFT_OFF):
        raise UsageError(f"{flag} excludes draft models: leave out --draft {settings.draft}")


def _secret_file(given: Given) -> Path | None:
    path = given.values.get("secret-file")
    return _expanded(path) if path else None


def listen_address(given: Given) -> Address:
    """Returns the address at which leaders reach this machine. Raises UsageError."""
    if "listen" not in given.values:
        raise UsageError("--listen is missing: give the address of this machine on one network, and a port")
    with given.naming(flags_of(FollowSettings)["address"]):
        return parse_listen_address(given.values["listen"])


def log_level(given: Given) -> int:
    """Returns the log level of `--log-level` or, without that flag, of OLLAMA_DEBUG."""
    level = given.values.get("log-level")
    return _LOG_LEVELS[level] if level else _ollama_level(given.environ.get("OLLAMA_DEBUG", ""))


def _ollama_level(debug: str) -> int:
    """Returns the log level for a value of OLLAMA_DEBUG, a Go boolean or an integer n for slog level -4n."""
    text = debug.strip().strip("\"'").strip()
    try:
        steps = ("off", "on").index(GO_BOOLEANS[text]) if text in GO_BOOLEANS else int(text)
    except ValueError:
        return logging.INFO
    levels = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, logs.TRACE)
    return levels[min(max(steps, -2), 2) + 2]


def _kv_bits(given: Given) -> int | None:
    if bits := given.values.get("kv-bits"):
        return None if bits == "off" else int(bits)
    kind = given.environ.get("OLLAMA_KV_CACHE_TYPE", "").strip(" \t\"'").lower()
    if kind not in _OLLAMA_KV_BITS:
        known = ", ".join(filter(None, _OLLAMA_KV_BITS))
        given.warnings.append(f"OLLAMA_KV_CACHE_TYPE={kind} is none of {known}: keys and values are not quantized")
    return _OLLAMA_KV_BITS.get(kind)


def _parallel(given: Given) -> int:
    if "parallel" in given.values:
        return _whole_number(_SERVER["parallel"], given.values["parallel"])
    wanted = given.environ.get("OLLAMA_NUM_PARALLEL", "").strip(" \t\"'")
    if not wanted.strip("0"):  # empty or 0: Ollama would choose the number, and so does the runner
        return DEFAULT_PARALLEL
    if not (wanted.isascii() and wanted.isdigit()):
        given.warnings.append(
            f"OLLAMA_NUM_PARALLEL={wanted} is not a whole number: {DEFAULT_PARALLEL} requests run at once"
        )
        return DEFAULT_PARALLEL
    number = int(wanted) if len(wanted) < 20 else MOST_PARALLEL + 1
    if number > MOST_PARALLEL:
        given.warnings.append(f"OLLAMA_NUM_PARALLEL={wanted}: at most {MOST_PARALLEL} requests run at once")
    return min(number, MOST_PARALLEL)


def _models_dir(given: Given) -> Path:
    """Returns the directory of `--models-dir`, else of OLLAMA_MODELS, else the user's store or the Linux service's."""
    if path := given.values.get("models-dir"):
        return _expanded(path)
    named = given.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    if named:
        return Path(named)
    # For a user without HOME and without an entry in the system's list, `~` stays and Path.home() would raise.
    home = Path(given.environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111
    store = home / ".ollama" / "models"
    if not home.is_absolute():
        return _SERVICE_STORE
    # Path.is_dir would raise if the service's store is closed to other users.
    return _SERVICE_STORE if not os.path.isdir(store) and os.path.isdir(_SERVICE_STORE) else store  # noqa: PTH112


def runner_url(given: Given) -> str:
    """Returns the URL of the runner that the argument (a URL or a port) or `--port` names. Raises UsageError."""
    text = given.values.get("url", "")
    if not text and "port" not in given.values:
        raise UsageError("name a runner: mlx-runner top --port N; its log shows the port (`listening url=...`)")
    if not text or text.isdecimal():
        flag = flags_of(TopSettings)["url"]
        with given._replace(variables=frozenset() if text else given.variables).naming(flag):
            return f"http://127.0.0.1:{_whole_number(flag, text or given.values['port'])}"
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        good = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{text}: a runner's address looks like http://127.0.0.1:11500")
    return f"http://{parts.netloc}"


_SERVER = flags_of(Settings)
_ODD: Mapping[str, Callable[[Given], object]] = {
    "models_dir": _models_dir,
    "disk_cache": _disk_cache,
    "kv_bits": _kv_bits,
    "parallel": _parallel,
    "followers": _followers,
    "secret_file": _secret_file,
    "blas_threads": lambda given: blas_threads(given.values),
    "log_level": log_level,
}
"""Field -> conversion, for fields that need more than the text of one flag or another rule than their type's."""
