"""The calls that the shim takes for MLX runners: all forms in which releases call their executable, and odd ones."""

import os
import subprocess
from pathlib import Path

import pytest

from runner.ollama.plan import Plan
from runner.ollama.shim import shim
from tests.process.launcher import standin
from tests.process.launcher.standin import Installation, Report, parse

MLX = (
    "runner --mlx-engine --model demo:latest --port 5",
    "runner --mlx-engine --model=demo:latest --port=5",
    "runner --mlx-engine --model /looks/like/a:path --port 5",
    "runner --mlx-engine --model --imagegen-engine:latest --port 5",
    "runner --mlx-engine",
    "runner --model demo:latest --port 5",
    "runner --model=demo:latest --port=5",
    "runner -model demo:latest -port 5",
    "runner --model localhost:5000/ns/demo:tag --port 5",
    "runner --model x--ollama-engine:latest --port 5",
    "runner --model --ollama-engine:--ollama-engine --port 5",
    "runner --port --model --model demo:latest",
)
OWN = (
    "",
    "--version",
    "gpu-discover --lib-dir /a --lib-dir /b",
    "runners --mlx-engine --model demo:latest --port 5",
    "--mlx-engine --model demo:latest",
    "runner",
    "runner --ollama-engine --port 5",
    "runner --imagegen-engine --model image:latest --port 5",
    "runner --llama-engine --model demo:latest --port 5",
    "runner --model /models/blobs/sha256-0123 --port 5",
    "runner --model /odd:place/blobs/sha256:0123 --port 5",
    "runner --model C:odd/blobs/sha256-0123 --port 5",
    "runner --port 5 --model",
    "runner --port demo:latest",
)


@pytest.fixture
def script(installation: Installation, tmp_path: Path) -> Path:
    """The shim of the installation."""
    path = tmp_path / "shim"
    environ = {"PATH": os.environ["PATH"], "CUDA_HOME": "it's"}
    path.write_bytes(shim(Plan(installation.ollama, ["serve"], [str(installation.runner), "--flag"]), environ))
    path.chmod(0o700)
    return path


def report(script: Path, words: list[str], **variables: str) -> Report:
    environ = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/a", "CUDA_PATH": "/b", "CUDA_HOME": "/c", **variables}
    process = subprocess.run([str(script), *words], env=environ, capture_output=True, timeout=standin.WAIT_S)
    assert process.stderr == b""
    return parse(process.stdout.rstrip())


@pytest.mark.parametrize("words", [*MLX, *OWN])
def test_mlx_runners_are_ours_and_all_else_is_ollamas(script: Path, installation: Installation, words: str) -> None:
    program = [str(installation.runner), "--flag"] if words in MLX else [str(installation.ollama)]
    assert report(script, words.split()).argv == [*program, *words.split()]


ODD = ["runner", "--mlx-engine", "--model", "a  b'\"$(exit 3)`x`*\n\\é\udcff:latest", "", "--port", "5"]


def test_words_are_passed_on_as_they_are(script: Path, installation: Installation) -> None:
    assert report(script, ODD).argv == [str(installation.runner), "--flag", *ODD]
    assert report(script, ["show", *ODD]).argv == [str(installation.ollama), "show", *ODD]


def test_runners_get_the_environment_that_the_host_was_started_with(script: Path) -> None:
    given = {"model": "kept", "engine": "kept", "expected": "kept", "word": "kept", "ODD": "'\"\n$x\\é\udcff"}
    ours = report(script, MLX[0].split(), **given).environment
    own = report(script, ["show"], **given).environment
    assert {name: ours[name] for name in given} == {name: own[name] for name in given} == given
    changed = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")
    assert [ours.get(name) for name in changed] == [None, None, "it's"]
    assert [own[name] for name in changed] == ["/a", "/b", "/c"]
