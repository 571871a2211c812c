"""A shell completes the words that the program takes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from runner.cli.commands import SERVER, SHELLS, completion
from runner.settings import flags_of

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture(name="script")
def script_of_bash(tmp_path: Path) -> Path:
    path = tmp_path / "mlx-runner.bash"
    path.write_text(completion(["bash"]))
    return path


def completed(script: Path, line: str) -> list[str]:
    """Returns what bash offers at the end of the line."""
    words = line.split(" ")
    code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_mlx_runner'
    code += '; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", code, "bash", str(script), *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=script.parent,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_one_that_its_shell_can_read(shell: str, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(completion([shell]))
    executable = shutil.which(shell)
    if executable is None:
        pytest.skip(f"there is no {shell}")
    subprocess.run([executable, "-n", str(path)], check=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_flag_and_every_command(shell: str) -> None:
    script = completion([shell])
    prefix = "-l " if shell == "fish" else "--"
    for command in (SERVER, *SERVER.below):
        assert command.name in script
        flags = flags_of(command.settings) if command.settings else {}
        for flag in flags.values():
            assert f"{prefix}{flag.name}" in script


@needs_bash
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("mlx-runner c", ["check", "completion"]),
        ("mlx-runner --cache", ["--cache", "--cache-memory"]),
        ("mlx-runner --cache ", ["trie", "single", "none"]),
        ("mlx-runner --port 1 --kv-bits ", ["8", "6", "5", "4", "3", "off"]),
        ("mlx-runner --port ", []),
        ("mlx-runner --models-dir ", ["models"]),
        ("mlx-runner --trace tr", ["trace.json"]),
        ("mlx-runner check --j", ["--json"]),
        ("mlx-runner top --", ["--port", "--once", "--help", "--version"]),
        ("mlx-runner ollama ", ["serve"]),
        ("mlx-runner ollama serve -", ["--runner", "-h", "--help", "--version"]),
    ],
)
def test_bash_offers_what_may_come_next(script: Path, line: str, wanted: list[str]) -> None:
    (script.parent / "models").mkdir()
    (script.parent / "trace.json").touch()
    assert completed(script, line) == wanted
