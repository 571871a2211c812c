"""Finds and checks the programs that `mlx-runner ollama serve` starts, before any file is made."""

import errno
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import runner
from runner.settings import Start

START: Start = "symlink" if sys.platform == "darwin" else "descriptor"
"""The way to start Ollama on this system."""
SERVE = ("serve", "start")
"""The first arguments with which Ollama serves. With any other argument, Ollama is a client, or exits immediately."""
_ISOLATIONS = (("-I",), ("-E", "-P"), ("-P",))
"""Sets of Python's options against modules in the current directory, on PYTHONPATH and in the user's site directory,
the strictest set first. The second set allows packages of `pip install --user`, the third one also PYTHONPATH."""
_PROBE_S = 60.0
_DEFAULT_PORT = 11434
_ADDRESS = re.compile(r"(?:(https?)://)?(\[[^\]]*\]|[^:/]*)(?::(\d{1,5}))?(?:/.*)?")
_OWN_RUNNER = b"mlxrunner"
"""The name of the folder of Ollama's MLX runner. Every Ollama executable with an MLX runner contains it."""
_MEDIA = re.compile(rb"/x/models/(\w+)\.\(\*Model\)\.PrepareMedia")
"""Matches names of functions in a Go executable, for the packages of models that take pictures or sound in Ollama's own
runner. The version does not help: own builds have none, and a release's cannot be read from the file."""
_PROGRAMS = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # Linux, macOS, macOS for several processors


class LaunchError(Exception):
    """Ollama cannot be started. The message tells a person the fault and the remedy."""


class Plan(NamedTuple):
    """The path of Ollama's executable (not of a symbolic link), Ollama's arguments, and the runner's command."""

    ollama: Path
    words: Sequence[str]
    runner: Sequence[str]
    start: Start = START
    media: Sequence[str] = ()
    """The packages of Ollama's sources with models that take pictures or sound in Ollama's own runner."""

    @property
    def libraries(self) -> Path | None:
        """Ollama's folder `lib/ollama`, in which Ollama's runners find MLX; None if there is no such folder."""
        home = self.ollama.parent
        places = [home.parent / "lib", *(home / name for name in ("lib", "build/lib"))]
        return next((place / "ollama" for place in places if (place / "ollama").is_dir()), None)

    @property
    def serves(self) -> bool:
        """True if Ollama is started as a server."""
        return self.words[0] in SERVE


def find_ollama(name: str | None) -> Path:
    """Returns Ollama's executable, given by path or by its name on PATH. Raises LaunchError if it does not fit."""
    found = shutil.which(name or "ollama")
    if found is None:
        if name is None:
            raise LaunchError(
                "there is no `ollama` on PATH; give the path of its executable: mlx-runner ollama serve PATH"
            )
        raise LaunchError(f"{name} is not a program (give the path of Ollama's executable first, then its arguments)")
    path = Path(found).resolve()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from error
    if content[:4] not in _PROGRAMS:
        raise LaunchError(
            f"{path} is a script or another file, not Ollama itself; give the path of the program that it starts"
        )
    if _OWN_RUNNER not in content:
        raise LaunchError(
            f"{path} is not an Ollama that serves MLX models (0.16.2 or newer); for a snap, give the path of the"
            " program inside it"
        )
    return path


def find_media(ollama: Path) -> list[str]:
    """Returns the packages of models that take pictures or sound in the MLX runner of this executable."""
    return sorted({name.decode() for name in _MEDIA.findall(ollama.read_bytes())})


@cache
def own_command() -> tuple[str, ...]:
    """Returns the command that runs this package, as isolated from other modules as possible. Raises LaunchError."""
    for options in _ISOLATIONS:
        if sys.flags.isolated or _finds_this_package(options):  # an isolated Python has found this package already
            return sys.executable, *options, "-m", "runner"
    raise LaunchError(f"{sys.executable} finds no package `runner`; install this one: pip install .")


def _finds_this_package(options: Sequence[str]) -> bool:
    command = [sys.executable, *options, "-c", "import runner; print(runner.__file__)"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_PROBE_S, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return False
    return os.fsdecode(done.stdout.rstrip(b"\n")) == runner.__file__


def find_runner(command: str | None) -> list[str]:
    """Returns the words of a runner's command; the first word becomes an absolute path. None stands for this runner."""
    if command is None:
        return list(own_command())
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--runner {command}: {error}") from error
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise LaunchError(f"--runner {command}: its first word is not a program")
    return [str(Path(found).absolute()), *words[1:]]


def refuse_taken_address(setting: str) -> None:
    """Raises LaunchError if a program listens on `setting`, a value of OLLAMA_HOST. Ollama reports other faults."""
    match = _ADDRESS.fullmatch(setting.strip().strip("\"'"))
    if match is None:
        return
    scheme, host, port = match.groups()
    number = int(port or {"http": 80, "https": 443}.get(scheme, _DEFAULT_PORT))
    try:
        found = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", number, type=socket.SOCK_STREAM)
        found.sort(key=lambda each: each[0] != socket.AF_INET)  # IPv4 first, as in Go, which uses the first address
        for family, kind, protocol, _, address in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {number} is taken: is another Ollama running? Stop it (`systemctl stop ollama`, or quit the "
                "Ollama app), or choose another port: OLLAMA_HOST=127.0.0.1:11435 mlx-runner ollama serve"
            ) from error
