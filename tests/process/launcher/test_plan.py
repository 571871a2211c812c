"""The launcher's refusals before it makes anything."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runner.ollama import plan
from runner.ollama.launcher import launch
from runner.ollama.plan import LaunchError, find_ollama, find_runner, own_command, refuse_taken_address
from runner.settings import LaunchSettings
from tests.process.launcher.standin import COMMAND, WAIT_S, environment, eventually_gone


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free(listener: int) -> int:
    """A port that is not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


FORMS = ("127.0.0.1:{}", "http://127.0.0.1:{}", "http://127.0.0.1:{}/a/path", ":{}", "0.0.0.0:{}", "localhost:{}")


@pytest.mark.parametrize("form", [*FORMS, ' "127.0.0.1:{}" ', "'127.0.0.1:{}'"])
def test_a_taken_port_is_reported(listener: int, free: int, form: str) -> None:
    with pytest.raises(LaunchError, match=f"^port {listener} is taken: is another Ollama running"):
        refuse_taken_address(form.format(listener))
    refuse_taken_address(form.format(free))


def test_without_a_port_it_is_ollamas_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look_up(host: str, port: int, **_: object) -> list[object]:
        asked.append((host, port))
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for setting in ("", "0.0.0.0", "http://example", "https://example/path", "[::1]:5"):
        refuse_taken_address(setting)
    assert asked == [("127.0.0.1", 11434), ("0.0.0.0", 11434), ("example", 80), ("example", 443), ("::1", 5)]


def test_an_executable_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ollama"
    program.write_bytes(b"\x7fELF ... x/mlxrunner ...")
    program.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert find_ollama(None) == find_ollama("ollama") == find_ollama("./link") == find_ollama(str(link)) == program
    program.chmod(0o600)
    for name in (None, "ollama", "./ollama", str(tmp_path), "/nowhere"):
        with pytest.raises(LaunchError, match=r"there is no `ollama` on PATH|is not a program"):
            find_ollama(name)


def test_a_script_around_ollama_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "ollama"
    script.write_text("#!/bin/sh\nexec ollama\n")
    script.chmod(0o700)
    with pytest.raises(LaunchError, match="is a script or another file"):
        find_ollama(str(script))


def test_a_runner_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "my runner"
    program.touch(0o700)
    monkeypatch.chdir(tmp_path)
    assert find_runner("'./my runner' --flag 'two words'") == [str(program), "--flag", "two words"]
    for command in ("", "'open", "./other"):
        with pytest.raises(LaunchError, match=r"^--runner .*: "):
            find_runner(command)


@pytest.mark.parametrize(
    ("works", "options"), [(("-I",), ["-I"]), (("-E", "-P"), ["-E", "-P"]), (("-P",), ["-P"]), ((), [])]
)
def test_the_own_command_is_as_isolated_as_the_package_allows(
    works: tuple[str, ...], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of `pip install --user` is invisible with -I, one on PYTHONPATH with -E."""
    looser = {"-I": 0, "-E": 1, "-P": 2}

    def finds(tried: Sequence[str]) -> bool:
        return bool(works) and looser[tried[0]] >= looser[works[0]]

    monkeypatch.setattr(plan, "_finds_this_package", finds)
    own_command.cache_clear()
    try:
        if options:
            assert own_command() == (sys.executable, *options, "-m", "runner")
        else:
            with pytest.raises(LaunchError, match="finds no package `runner`"):
                own_command()
    finally:
        own_command.cache_clear()


def test_the_own_command_runs_this_package() -> None:
    done = subprocess.run([*own_command(), "--version"], cwd="/", capture_output=True, timeout=WAIT_S, check=True)
    assert done.stdout.startswith(b"mlx-runner ")


def refused(*words: str, **variables: str) -> str:
    """Returns the launcher's error when it exits with status 1."""
    argv = [*COMMAND, *words]
    environ = environment(Path("/nonexistent"), **variables)
    process = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=WAIT_S)
    assert process.returncode == 1
    assert process.stdout == ""
    return process.stderr


def test_each_refusal_is_one_line(listener: int, program: Path) -> None:
    assert refused("/nowhere/ollama").startswith("Error: /nowhere/ollama is not a program")
    assert refused("--runner", "/nowhere", str(program)).startswith("Error: --runner /nowhere: ")
    taken = refused(str(program), OLLAMA_HOST=f"127.0.0.1:{listener}")
    assert taken.startswith(f"Error: port {listener} is taken: ")
    assert taken.count("\n") == 1


def test_a_client_may_be_started_beside_a_server(listener: int, program: Path, tmp_path: Path) -> None:
    environ = environment(tmp_path, OLLAMA_HOST=f"127.0.0.1:{listener}")
    process = subprocess.run([*COMMAND, str(program), "list"], env=environ, capture_output=True, timeout=WAIT_S)
    assert process.returncode == 0
    assert process.stderr == b"", "nothing but what Ollama says"


def test_an_executable_that_cannot_run_is_reported_and_nothing_stays(tmp_path: Path) -> None:
    broken = tmp_path / "ollama"
    broken.write_bytes(b"\x7fELF and nothing else but mlxrunner")
    broken.chmod(0o700)
    environ = environment(tmp_path)
    argv = [*COMMAND, str(broken), "version"]
    process = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=WAIT_S)
    assert process.returncode == 1
    assert process.stderr == f"Error: cannot execute {broken}: Exec format error\n"
    assert all(eventually_gone(path) for path in tmp_path.glob("cache/*/*"))


def test_a_refusal_steers_no_terminal() -> None:
    with pytest.raises(SystemExit, match=r"^Error: /no\\u001b\[2J\\u009b is not a program ") as refused:
        launch(LaunchSettings(ollama="/no\x1b[2J\x9b"), {})
    assert str(refused.value).isprintable()
