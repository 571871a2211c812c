"""The stand-in for Ollama (standin.c): built once, installed where a test wants it, and driven line by line."""

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from runner.ollama.directory import PREFIX
from runner.settings import Start
from tests import ROOT

Launcher = Sequence[str]
SCRIPT: Launcher = (str(ROOT / "scripts" / "ollama-serve"),)
COMMAND: Launcher = (str(ROOT / os.environ.get("RUNNER_VENV", ".venv") / "bin" / "mlx-runner"), "ollama", "serve")
"""The installed program, in the virtual environment that the script has set up."""
ODD = 'it\'s a "Café" $HOME `x` \\'
"""A directory name with all characters that a shell could misread."""
WAIT_S = 60.0


def reason_to_skip() -> str | None:
    """Returns the reason why the stand-in cannot be built here, if there is one."""
    if sys.platform != "linux":
        return "the stand-in looks itself up in /proc, as hosts do on Linux"
    if shutil.which("cc") is None:
        return "no C compiler (cc) to build the stand-in with"
    return None


def build(directory: Path) -> Path:
    """The compiled stand-in."""
    program = directory / "standin"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O1", "-o", str(program), str(source)], check=True)
    return program


class Installation(NamedTuple):
    """An installed Ollama, and a runner: both are the stand-in, and tell which they are by their path."""

    ollama: Path
    runner: Path

    @property
    def libraries(self) -> Path:
        return self.ollama.parents[1] / "lib" / "ollama"


def install(program: Path, root: Path) -> Installation:
    """`bin/ollama` and `lib/ollama` in a directory of an odd name, and a runner of a name as odd."""
    home = root / ODD
    installation = Installation(home / "bin" / "ollama", root / f"runner {ODD}")
    (installation.libraries / "mlx_cuda_v13").mkdir(parents=True)
    (installation.libraries / "libggml.so").write_bytes(b"a library")
    installation.ollama.parent.mkdir()
    (installation.ollama.parent / "ollama-helper").write_bytes(b"a helper")
    for path in installation:
        shutil.copy(program, path)
    return installation


@dataclass(frozen=True)
class Report:
    """A process's own report of how it was started."""

    pid: int
    executable: str
    """The target of /proc/self/exe."""
    cwd: str
    libraries: str
    ignored: str
    """The mask of its ignored signals."""
    argv: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Spawned:
    """A child of the stand-in: the process id that its parent knows, its reports, other output, how it ended."""

    pid: int
    reports: list[Report]
    output: bytes
    status: int

    @property
    def report(self) -> Report:
        """The only report."""
        (report,) = self.reports
        return report


def environment(place: Path, **variables: str) -> dict[str, str]:
    """A small one of its own, in which private directories are made in `place`."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place / "home"),
        "PWD": str(place),
        "XDG_CACHE_HOME": str(place / "cache"),
        "TMPDIR": str(place),
        "OLLAMA_HOST": "127.0.0.1:0",
        **variables,
    }


def command(
    installation: Installation, start: Start, words: Sequence[str] = ("serve",), launcher: Launcher = COMMAND
) -> list[str]:
    """Returns the launcher's command line for the installation's Ollama and runner."""
    runner = shlex.join([str(installation.runner), "a word"])
    return [*launcher, "--start", start, "--runner", runner, str(installation.ollama), *words]


class Host:
    """A running stand-in, as the test that started it sees it."""

    def __init__(self, argv: Sequence[str], variables: Mapping[str, str], cwd: Path) -> None:
        self.popen = subprocess.Popen(
            argv,
            env=dict(variables),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            preexec_fn=_listen_to_interrupts,
        )
        self._rest = b""
        self.report = parse(self.line())
        if directory := self.directory:
            assert eventually_gone(directory / "shim"), "by symlink, it gets into its place a moment after the start"

    @property
    def directory(self) -> Path | None:
        """The private directory whose lock it holds; None when it was started without the launcher."""
        links = [path.readlink() for path in Path(f"/proc/{self.popen.pid}/fd").iterdir()]
        found = [path for path in links if path.name.startswith(PREFIX)]
        return found[0] if found else None

    def line(self) -> bytes:
        """The next line of output, without its end. AssertionError when none comes."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + WAIT_S
        while b"\n" not in self._rest:
            remaining = deadline - time.monotonic()
            ready, _, _ = select.select([self.popen.stdout], [], [], max(remaining, 0))
            assert ready, f"no line within {WAIT_S} s after {self._rest!r}"
            chunk = os.read(self.popen.stdout.fileno(), 1 << 16)
            assert chunk, f"the output ended after {self._rest!r}"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def tell(self, *words: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(" ".join(words).encode() + b"\n")

    def begin(self, words: Sequence[str], verb: str = "spawn") -> int:
        """Let it start its own executable; the child's process id."""
        self.tell(verb, *(word.encode(errors="surrogateescape").hex() or "-" for word in words))
        verb_of_answer, _, pid = self.line().partition(b" ")
        assert verb_of_answer == b"spawned"
        return int(pid)

    def spawn(self, *words: str, verb: str = "spawn") -> Spawned:
        """Let it start its own executable and wait for its end."""
        pid = self.begin(words, verb)
        lines = []
        while not (line := self.line()).startswith(b"ended "):
            lines.append(line)
        reports = [parse(line) for line in lines if line.startswith(b"report ")]
        others = [line for line in lines if not line.startswith(b"report ")]
        return Spawned(pid, reports, b"\n".join(others), int(line.partition(b" ")[2]))

    def wait(self) -> int:
        return self.popen.wait(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=WAIT_S)


def _listen_to_interrupts() -> None:
    """A shell that starts the tests in the background lets them, and all that they start, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def parse(line: bytes) -> Report:
    """A report's line."""
    assert line.startswith(b"report "), line
    pairs = dict(field.split(b"=", 1) for field in line.split()[1:])
    texts = {key: text(value) for key, value in pairs.items() if key not in (b"pid", b"argv", b"environment")}
    return Report(
        pid=int(pairs[b"pid"]),
        executable=texts[b"exe"],
        cwd=texts[b"cwd"],
        libraries=texts[b"libraries"],
        ignored=texts[b"ignored"],
        argv=[text(word) for word in pairs[b"argv"].split(b",")[:-1]],
        environment=dict(text(word).split("=", 1) for word in pairs[b"environment"].split(b",")[:-1]),
    )


def text(digits: bytes) -> str:
    return os.fsdecode(bytes.fromhex(digits.decode()))


def eventually_gone(path: Path) -> bool:
    """Returns True if it vanishes within WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
