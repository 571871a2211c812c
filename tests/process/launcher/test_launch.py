"""`mlx-runner ollama serve` with a stand-in that finds itself and spawns as a host does.

See docs/internals/wire.md, 1.2, 1.3.

The tests try the command and the script, and both ways to start Ollama: that of macOS with a stand-in that goes by the
path by which it was started.
"""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.process.parent import OLLAMA
from runner.settings import Start
from tests.process.launcher.standin import (
    COMMAND,
    SCRIPT,
    Host,
    Installation,
    Launcher,
    command,
    environment,
    eventually_gone,
    parse,
)


class Way(NamedTuple):
    """A launcher, and how it starts Ollama."""

    launcher: Launcher
    start: Start

    def command(self, installation: Installation, words: Sequence[str] = ("serve",)) -> list[str]:
        return command(installation, self.start, words, self.launcher)

    def variables(self, place: Path, **more: str) -> dict[str, str]:
        return environment(place, **more | ({"STANDIN_RESOLVE": "start"} if self.start == "symlink" else {}))


WAYS = (Way(COMMAND, "descriptor"), Way(COMMAND, "symlink"), Way(SCRIPT, "descriptor"))
MLX = (
    ("runner", "--mlx-engine", "--model", "demo:latest", "--port", "50001"),
    ("runner", "--mlx-engine", "--model", "localhost:5000/ns/m:tag", "--port", "50002"),
    ("runner", "--model", "demo:latest", "--port", "50003"),
)
OWN = (
    ("gpu-discover", "--lib-dir", "a directory"),
    ("runner", "--ollama-engine", "--port", "50004"),
    ("runner", "--model", "/models/blobs/sha256-0123", "--port", "50005"),
    ("runner", "--imagegen-engine", "--model", "image:latest", "--port", "50006"),
    ("--version",),
)
SHELL_SETS = {"_", "SHLVL", "OLDPWD"}
"""Variables that a shell in between changes or adds."""


def less_shell(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in SHELL_SETS}


def state(root: Path) -> dict[str, tuple[int, int, int, str]]:
    """Every file below `root`: mode, time of change, links to it, digest."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = status.st_mode, status.st_mtime_ns, status.st_nlink, digest
    return found


def directory_of(place: Path) -> Path:
    """The one private directory below `place`."""
    (found,) = (place / "cache" / "ollama-mlx-runner").iterdir()
    return found


def processes_with(*words: str) -> list[int]:
    """Returns the processes whose command line contains all of the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = os.fsdecode(path.read_bytes())
            if all(word in line for word in words):
                found.append(int(path.parent.name))
    return found


@pytest.fixture(params=WAYS, ids=lambda way: f"{'script' if way.launcher is SCRIPT else 'command'}-{way.start}")
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def host(installation: Installation, tmp_path: Path, way: Way) -> Iterator[Host]:
    environ = way.variables(tmp_path, LD_LIBRARY_PATH="/a b:/c'd", CUDA_HOME="/own cuda")
    with Host(way.command(installation), environ, tmp_path) as host:
        yield host


def test_the_launcher_becomes_ollama(installation: Installation, tmp_path: Path, way: Way) -> None:
    environ = way.variables(tmp_path, LD_LIBRARY_PATH="/a b", ODD="'\"\n$x`\\é")
    with Host([str(installation.ollama), "serve"], environ, tmp_path) as plain:
        pass
    words = ("serve", "--two words", "", "'\"$x`\\é")
    with Host(way.command(installation, words), environ, tmp_path) as host:
        report = host.report
        name = Path(f"/proc/{host.popen.pid}/comm").read_text().strip()
        descriptors = list(Path(f"/proc/{host.popen.pid}/fd").iterdir())
        assert host.directory == directory_of(tmp_path)
    assert report.pid == host.popen.pid
    assert report.argv == [str(installation.ollama), *words]
    assert report.cwd == str(tmp_path)
    assert less_shell(report.environment) == less_shell(plain.report.environment) == environ
    assert report.ignored == plain.report.ignored
    assert name == "ollama"
    assert len(descriptors) == 4, "nothing is handed down but the three streams and the lock"


def test_the_locale_stays_as_it_is(installation: Installation, tmp_path: Path) -> None:
    """Python changes that of C, also for what it starts."""
    environ = environment(tmp_path, LC_CTYPE="C")
    with Host(command(installation, "descriptor"), environ, tmp_path) as host:
        assert less_shell(host.report.environment) == environ


def test_an_ignored_interrupt_stays_ignored(installation: Installation, tmp_path: Path, way: Way) -> None:
    """As below nohup, or in the background of a script."""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    ignored = []
    for argv in ([str(installation.ollama), "serve"], command(installation, "descriptor", launcher=way.launcher)):
        with Host([*ignoring, *argv], environment(tmp_path), tmp_path) as host:
            ignored.append(int(host.report.ignored, 16))
    assert ignored[0] == ignored[1]
    assert ignored[0] & 1 << signal.SIGINT - 1


def test_its_mlx_runners_are_ours_and_everything_else_its_own(host: Host, installation: Installation, way: Way) -> None:
    for words in (*MLX, *OWN) * 2:
        spawned = host.spawn(*words)
        report = spawned.report
        assert report.pid == spawned.pid, "a host signals the process that it started"
        assert spawned.status == 0
        assert spawned.output == b""
        assert report.cwd == host.report.cwd
        if words in MLX:
            assert report.executable == str(installation.runner)
            assert report.argv == [str(installation.runner), "a word", *words]
            environ = {name: value for name, value in report.environment.items() if not name.startswith(OLLAMA)}
            assert less_shell(environ) == less_shell(host.report.environment)
        else:
            libraries = host.report.libraries
            assert report.executable == str(installation.ollama)
            assert report.argv == [str(installation.ollama), *words]
            assert less_shell(report.environment) == less_shell(host.report.environment) | {
                "LD_LIBRARY_PATH": f"{libraries}:{libraries}/mlx_cuda_v13:/a b:/c'd",
                "CUDA_PATH": f"{libraries}/mlx_cuda_v13",
                "CUDA_HOME": f"{libraries}/mlx_cuda_v13",
            }


def test_the_installation_is_not_touched(installation: Installation, tmp_path: Path, way: Way) -> None:
    before = state(installation.ollama.parents[1])
    with Host(way.command(installation), way.variables(tmp_path), tmp_path) as host:
        host.spawn(*MLX[0])
        host.spawn(*OWN[0])
        directory = directory_of(tmp_path)
        running = state(installation.ollama.parents[1])
    assert eventually_gone(directory)
    assert before == running == state(installation.ollama.parents[1])


def test_a_server_started_by_a_client_is_launched_too(host: Host, installation: Installation) -> None:
    spawned = host.spawn("serve")
    report = spawned.report
    assert report.pid == spawned.pid
    assert report.argv == [str(installation.ollama), "serve"]
    told = [line for line in spawned.output.splitlines() if b" holds links to it, " in line]
    assert len(told) == 1
    assert str(host.directory).encode() not in told[0], "it has a private directory of its own"


def test_the_directory_is_removed_even_if_all_processes_were_signalled(host: Host, tmp_path: Path) -> None:
    """As systemd does it, which signals all processes of a service."""
    directory = directory_of(tmp_path)
    (watcher,) = processes_with("--start", str(tmp_path))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watcher, number)
    host.popen.terminate()
    assert host.wait() == -signal.SIGTERM
    assert eventually_gone(directory)


def test_its_exit_status_is_the_launchers(host: Host) -> None:
    host.tell("exit 7")
    assert host.wait() == 7


def test_a_signal_reaches_the_runner(installation: Installation, tmp_path: Path, way: Way) -> None:
    environ = way.variables(tmp_path, STANDIN_LINGER="1")
    with Host(way.command(installation), environ, tmp_path) as host:
        spawned = host.spawn(*MLX[0], verb="interrupt")
    assert spawned.report.executable == str(installation.runner)
    assert spawned.status == -signal.SIGINT


def test_the_directory_stays_while_a_runner_lives(installation: Installation, tmp_path: Path, way: Way) -> None:
    environ = way.variables(tmp_path, STANDIN_LINGER="1")
    with Host(way.command(installation), environ, tmp_path) as host:
        runner = host.begin(MLX[0])
        assert parse(host.line()).pid == runner
        directory = directory_of(tmp_path)
        host.popen.kill()
        host.wait()
        assert host.popen.stdout is not None
        assert host.popen.stdout.read() == b"", "nobody keeps its output open"
        time.sleep(0.2)
        assert directory.exists()
        os.kill(runner, signal.SIGKILL)
        assert eventually_gone(directory)


def test_a_name_on_path_and_a_link_to_the_script(installation: Installation, tmp_path: Path) -> None:
    link = tmp_path / "a link"
    link.symlink_to(SCRIPT[0])
    environ = environment(tmp_path)
    environ["PATH"] = f"{installation.ollama.parent}:{environ['PATH']}"
    with Host([str(link)], environ, tmp_path) as host:
        assert host.report.argv == [str(installation.ollama), "serve"]
