"""`mlx-runner check` as a process: what it prints where, its exit status, and what it leaves alone."""

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.process.conftest import MAIN, RUNNER, SENTENCEPIECE


def check(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUNNER, "check", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_good_model_is_status_0_and_nothing_on_stderr(models_dir: Path) -> None:
    done = check(SENTENCEPIECE, OLLAMA_MODELS=str(models_dir))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"model         {SENTENCEPIECE}\n")
    assert done.stdout.endswith("verdict       would load\n")


def test_neither_the_server_nor_transformers_is_imported(models_dir: Path) -> None:
    code = (
        "import sys\n"
        "from runner.app import start\n"
        "try: start(['check', *sys.argv[1:]])\n"
        "finally: sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    words = [sys.executable, "-c", code, MAIN, "--models-dir", str(models_dir)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    imported = set(done.stderr.split())
    assert {"runner", "mlx", "tokenizers"} <= imported
    assert not imported & {"aiohttp", "transformers", "numpy", "huggingface_hub"}


def test_a_result_that_cannot_be_written_is_an_error(models_dir: Path) -> None:
    environment = {**os.environ, "OLLAMA_MODELS": str(models_dir)}
    with Path(os.devnull).open() as unwritable:
        done = subprocess.run(
            [*RUNNER, "check", MAIN],
            env=environment,
            stdout=unwritable,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: write to standard output: ")
    assert done.stderr.count("\n") == 1
