"""Spawning, readiness and close behave as a host's do, shown on small stand-in runners."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools.host.lib import A, F, LoadError, Process, spawn, write_decoys
from tests.tools.host.stand_in import STAND_IN

ECHO = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def run(code: str, **arguments: object) -> Process:
    return spawn([sys.executable, "-c", code], "m:latest", **arguments)  # type: ignore[arg-type]  # as spawn's own


def test_argv_and_environment_are_the_hosts(tmp_path: Path) -> None:
    process = run(ECHO, models_dir=tmp_path, libraries=write_decoys(tmp_path / "lib"), arguments=["--cache", "none"])
    assert process.wait(10) == 0
    argv, environment = json.loads(process.output.text)
    assert argv == [*("runner", "--mlx-engine", "--model", "m:latest", "--port", str(process.port), "--cache", "none")]
    backend = tmp_path / "lib" / "mlx_cuda_v13"
    assert environment["OLLAMA_MODELS"] == str(tmp_path)
    assert environment["LD_LIBRARY_PATH"].split(":")[:2] == [str(tmp_path / "lib"), str(backend)]
    assert environment["CUDA_PATH"] == environment["CUDA_HOME"] == str(backend)
    assert environment["PATH"] == os.environ["PATH"]


def test_readiness_needs_200_on_the_path_of_the_generation() -> None:
    with spawn(STAND_IN, "m:latest") as process:
        assert process.wait_ready(10) < 10
    with spawn(STAND_IN, "m:latest", generation=A) as process, pytest.raises(LoadError, match="to start"):
        process.wait_ready(0.6)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import sys; sys.stderr.write('Error: no\\n'); sys.exit(1)", r"mlx runner failed: Error: no \(exit: exit st"),
        ("import sys; sys.exit(3)", "mlx runner exited unexpectedly: exit status 3"),
        ("pass", r"mlx runner exited unexpectedly: %!w\(<nil>\)"),
        ("import sys; sys.stderr.write('Error: no\\n')", r"mlx runner failed: Error: no \(exit: <nil>\)"),
        ("import os; os.kill(os.getpid(), 9)", "mlx runner exited unexpectedly: signal: killed"),
    ],
)
def test_a_failed_load_has_the_hosts_text(code: str, text: str) -> None:
    with run(code) as process, pytest.raises(LoadError, match=text):
        process.wait_ready(10)


def test_close_is_sigint_then_after_the_grace_sigkill() -> None:
    stubborn = "import signal, time; signal.signal(2, lambda *_: None); print('up', flush=True); time.sleep(60)"
    assert F.close_grace_s == 5
    process = run(stubborn, generation=replace(F, close_grace_s=1))
    deadline = time.monotonic() + 30
    while "up" not in process.output.text:
        assert time.monotonic() < deadline, process.output.text
        time.sleep(0.01)
    assert 0.9 < process.close() < 3
    assert process.exit_status == -signal.SIGKILL
