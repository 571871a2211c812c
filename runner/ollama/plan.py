"""What `scripts/ollama-serve` is asked to start, found and checked before anything is made."""

import errno
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Start = Literal["descriptor", "symlink"]
"""How the host is started, so that it finds the shim afterwards (runner/ollama/launcher.py)."""
START: Start = "symlink" if sys.platform == "darwin" else "descriptor"
RUNNER = (sys.executable, "-I", "-m", "runner")
"""This checkout's. Isolated: where the user is, and on his PYTHONPATH, may lie anything."""
SERVE = ("serve", "start")
"""The words with which Ollama serves; with all others it is a client, or ends at once."""
_DEFAULT_PORT = 11434
_ADDRESS = re.compile(r"(?:(https?)://)?(\[[^\]]*\]|[^:/]*)(?::(\d{1,5}))?(?:/.*)?")
_OWN_RUNNER = b"mlxrunner"
"""In the executables of all hosts that have one: the folder of its sources."""
_MEDIA = re.compile(rb"/x/models/(\w+)\.\(\*Model\)\.PrepareMedia")
"""Go keeps the names of functions: the packages of the models that its own runner shows pictures or plays sound to. The
version would not do: those who build Ollama themselves have none, and its releases' is nowhere to be read."""
_PROGRAMS = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # Linux, macOS, macOS for several processors


class LaunchError(Exception):
    """Ollama cannot be started. The text is for a person: what failed, and what to do."""


class Plan(NamedTuple):
    """What is to be started: Ollama's executable (no symbolic link), its arguments, and the runner's command."""

    ollama: Path
    words: Sequence[str]
    runner: Sequence[str]
    start: Start = START
    media: Sequence[str] = ()
    """The packages of Ollama's sources whose models take pictures or sound in its own runner."""

    @property
    def libraries(self) -> Path | None:
        """Ollama's `lib/ollama`, where its runners find MLX; None if it has none."""
        home = self.ollama.parent
        places = [home.parent / "lib", *(home / name for name in ("lib", "build/lib"))]
        return next((place / "ollama" for place in places if (place / "ollama").is_dir()), None)

    @property
    def serves(self) -> bool:
        """Whether Ollama will listen."""
        return self.words[0] in SERVE


def find_ollama(name: str | None) -> Path:
    """The executable that a path, or a name on PATH, leads to. Raises LaunchError."""
    found = shutil.which(name or "ollama")
    if found is None:
        if name is None:
            raise LaunchError("there is no `ollama` on PATH; name its executable: scripts/ollama-serve PATH")
        raise LaunchError(f"{name} is no program (the first word is Ollama's executable, then come its arguments)")
    path = Path(found).resolve()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from error
    if content[:4] not in _PROGRAMS:
        raise LaunchError(f"{path} is a script or something else, not Ollama itself; name the program that it starts")
    if _OWN_RUNNER not in content:
        raise LaunchError(
            f"{path} is no Ollama that has MLX models (0.16.2 or newer); of a snap, name the program in it"
        )
    return path


def find_media(ollama: Path) -> list[str]:
    """The packages whose models take pictures or sound in the runner of this executable."""
    return sorted({name.decode() for name in _MEDIA.findall(ollama.read_bytes())})


def find_runner(command: str | None) -> list[str]:
    """The words of a runner's command, the first one as an absolute path; of ours without `command`."""
    if command is None:
        return list(RUNNER)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--runner {command}: {error}") from error
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise LaunchError(f"--runner {command}: its first word is no program")
    return [str(Path(found).absolute()), *words[1:]]


def refuse_taken_address(setting: str) -> None:
    """Raises LaunchError if something listens on `setting`, an OLLAMA_HOST. What else is wrong with it, Ollama says."""
    match = _ADDRESS.fullmatch(setting.strip().strip("\"'"))
    if match is None:
        return
    scheme, host, port = match.groups()
    number = int(port or {"http": 80, "https": 443}.get(scheme, _DEFAULT_PORT))
    try:
        found = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", number, type=socket.SOCK_STREAM)
        found.sort(key=lambda each: each[0] != socket.AF_INET)  # as Go, which takes the first one
        for family, kind, protocol, _, address in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {number} is taken: is another Ollama running? Stop it (`systemctl stop ollama`, or quit the "
                "Ollama app), or choose another port: OLLAMA_HOST=127.0.0.1:11435 scripts/ollama-serve ..."
            ) from error
