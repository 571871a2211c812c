"""`mlx-runner check` as a process: what it prints where, its exit status, and what it leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.process.conftest import MAIN, RUNNER, SENTENCEPIECE, command


def test_a_good_model_is_status_0_and_nothing_on_stderr(models_dir: Path) -> None:
    done = command("check", SENTENCEPIECE, OLLAMA_MODELS=str(models_dir))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"model         {SENTENCEPIECE}\n")
    assert done.stdout.endswith("verdict       would load\n")


def test_neither_the_server_nor_transformers_is_imported(models_dir: Path) -> None:
    code = (
        "import sys\n"
        "from runner.app import run_process\n"
        "try: run_process(['check', *sys.argv[1:]])\n"
        "finally: sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    words = [sys.executable, "-c", code, MAIN, "--models-dir", str(models_dir)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    imported = set(done.stderr.split())
    assert {"runner", "mlx", "tokenizers"} <= imported
    assert not imported & {"aiohttp", "transformers", "numpy", "huggingface_hub"}


def test_a_result_that_cannot_be_written_is_an_error(models_dir: Path) -> None:
    words = [*RUNNER, "check", MAIN, "--models-dir", str(models_dir)]
    with Path(os.devnull).open() as unwritable:
        done = subprocess.run(words, stdout=unwritable, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: write to standard output: ")
    assert done.stderr.count("\n") == 1


FORMATS = {
    '{"type": "object"}': ("whole", None),
    '"json"': ("whole", None),
    '{"type": "string", "format": "path"}': ("in part", "Unknown format: path - at `$` of the JSON schema"),
    '{"type": "text"}': ("not at all", "Format: Invalid type: text - at `$` of the JSON schema"),
    '{"type": ': ("not at all", "Format: Input data was truncated"),
    "null\n": ("not at all", "the file has no format"),
}
"""A format -> what a request with it gets, and why."""


@pytest.mark.parametrize("text", FORMATS)
def test_a_format_is_compiled_as_for_a_request(text: str, models_dir: Path) -> None:
    enforced, why = FORMATS[text]
    done = command("check", MAIN, "--format", "-", "--json", given=text, OLLAMA_MODELS=str(models_dir))
    assert json.loads(done.stdout)["format"] == {"enforced": enforced, "why": why}
    assert (done.returncode, done.stderr) == (int(enforced == "not at all"), "")


def test_the_report_has_a_line_for_a_format(models_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "string", "format": "path"}')
    done = command("check", MAIN, "--format", str(tmp_path / "schema.json"), OLLAMA_MODELS=str(models_dir))
    assert "\nformat        enforced in part, without this: Unknown format: path - at `$` of the JSON" in done.stdout
    done = command("check", MAIN, "--format", str(tmp_path), OLLAMA_MODELS=str(models_dir))
    assert (done.returncode, done.stderr) == (1, f"Error: --format {tmp_path}: is a directory\n")
