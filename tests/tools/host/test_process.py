"""Spawning, readiness and close behave as a host's do, shown on small stand-in runners."""

import json
import math
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools.host.lib import RULES, A, E, F, G, LoadError, Process, Rule, spawn, write_decoys
from scripts.tools.host.lib.output import EVERY_LINE, LAST_OF_BOTH, LAST_STDERR, SCANNED, SCANNED_BOTH
from tests.lib.patience import stretched
from tests.tools.host.conftest import STAND_IN

ECHO = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
READY = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"Status": 0, "Progress": 100, "ContextLength": 8, "Memory": 1}).encode()
        self.send_response(200 if self.path == "/v1/status" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def run(code: str, **arguments: object) -> Process:
    return spawn([sys.executable, "-c", code], "m:latest", **arguments)  # type: ignore[arg-type]  # as spawn's own


def test_argv_and_environment_are_the_hosts(tmp_path: Path) -> None:
    process = run(ECHO, models_dir=tmp_path, libraries=write_decoys(tmp_path / "lib"), arguments=["--cache", "none"])
    assert process.wait(10) == 0
    argv, environment = json.loads(process.output.text)
    assert argv == [
        *("runner", "--mlx-engine", "--model", "m:latest", "--port", str(process.port), "--cache", "none"),
    ]
    backend = tmp_path / "lib" / "mlx_cuda_v13"
    assert environment["OLLAMA_MODELS"] == str(tmp_path)
    assert environment["LD_LIBRARY_PATH"].split(":")[:2] == [str(tmp_path / "lib"), str(backend)]
    assert environment["CUDA_PATH"] == environment["CUDA_HOME"] == str(backend)
    assert environment["PATH"] == os.environ["PATH"]


def test_generation_g_leaves_the_engine_flag_out() -> None:
    process = run(ECHO, generation=G)
    assert process.wait(10) == 0
    assert "--mlx-engine" not in json.loads(process.output.text)[0]


def test_hosts_before_v0_19_name_no_cuda_headers_and_the_first_backend_with_some_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_PATH", "/mine")
    write_decoys(tmp_path / "lib")
    (tmp_path / "lib" / "mlx_cuda_v12").mkdir()
    (tmp_path / "lib" / "mlx_cuda_v14" / "include").mkdir(parents=True)
    late = run(ECHO, libraries=tmp_path / "lib")
    early = run(ECHO, libraries=tmp_path / "lib", generation=A)
    assert (late.wait(10), early.wait(10)) == (0, 0)
    assert json.loads(late.output.text)[1]["CUDA_PATH"] == str(tmp_path / "lib" / "mlx_cuda_v13")
    environment = json.loads(early.output.text)[1]
    assert environment["CUDA_PATH"] == "/mine"
    backends = [str(tmp_path / "lib" / f"mlx_cuda_v{number}") for number in (12, 13, 14)]
    assert environment["LD_LIBRARY_PATH"].split(":")[1:4] == backends


def test_readiness_needs_200_on_the_path_of_the_generation() -> None:
    with run(READY) as process:
        assert process.wait_ready(10) < 10
    with run(READY, generation=A) as process, pytest.raises(LoadError, match="to start"):
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


def test_generation_g_kills_at_once() -> None:
    process = run("import time; time.sleep(60)", generation=G)
    assert process.close() < stretched(2)
    assert process.exit_status == -signal.SIGKILL


def test_a_grandchild_that_holds_the_pipe_hides_the_exit() -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1)'])"
    process = run(code)
    assert process.wait(0.5) is None
    assert process.wait(10) == 0


STDOUT_LAST = "import os; os.write(2, b'Error: to stderr\\n'); os.write(1, b'to stdout\\n'); os._exit(1)"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_failed_load_shows_what_the_rule_remembers_of_the_right_pipe(rule: Rule) -> None:
    copied: list[bytes] = []
    with run(STDOUT_LAST, rule=rule, copy_to=copied.append) as process, pytest.raises(LoadError) as failure:
        process.wait_ready(10)
    remembered = "to stdout" if rule is LAST_OF_BOTH else "Error: to stderr"
    assert str(failure.value) == f"mlx runner failed: {remembered} (exit: exit status 1)"
    assert sorted(process.output.lines) == ["Error: to stderr", "to stdout"]
    assert process.output.stdout == ("to stdout\n" if rule.separate else "")
    assert sorted(b"".join(copied).splitlines()) == [b"Error: to stderr", b"to stdout"]


@pytest.mark.parametrize(
    ("rule", "pipe", "stops"),
    [
        (SCANNED_BOTH, 1, True),
        (SCANNED_BOTH, 2, True),
        (SCANNED, 1, False),
        (SCANNED, 2, True),
        (LAST_STDERR, 2, False),
        (EVERY_LINE, 2, False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_line_above_64_kib_blocks_the_runner_of_a_scanning_host(rule: Rule, pipe: int, stops: bool) -> None:
    code = "import os, signal; signal.signal(2, signal.SIG_DFL); data = b'x' * 400_000\n"
    code += f"while data: data = data[os.write({pipe}, data):]\nos._exit(3)"
    process = run(code, rule=rule)
    assert process.wait(0.5 if stops else 10.0) == (None if stops else 3)
    process.close()
    assert process.exit_status == (-signal.SIGINT if stops else 3)


def test_a_host_with_two_pipes_does_not_wait_for_a_grandchild() -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])"
    process = run(code, rule=SCANNED)
    assert process.wait(25) == 0


def test_the_rule_is_the_newest_of_the_generation_unless_another_is_named() -> None:
    for generation, rule in ((A, SCANNED), (E, EVERY_LINE), (G, EVERY_LINE)):
        process = run("pass", generation=generation)
        assert process.output.rule is rule
        assert process.wait(10) == 0


def test_a_load_has_the_time_that_the_generation_gives_it() -> None:
    assert (A.load_timeout_s, E.load_timeout_s, F.load_timeout_s) == (120, 300, 300)
    with run(READY, generation=replace(A, load_timeout_s=0.3)) as process, pytest.raises(LoadError, match="to start"):
        process.wait_ready()


def test_a_timeout_shows_what_was_captured() -> None:
    code = "import os, time; os.write(2, b'note: mlx: busy\\n'); time.sleep(60)"
    with run(code) as process, pytest.raises(LoadError, match=r"^timeout waiting for mlx runner: mlx: busy$"):
        process.wait_ready(0.6)


def test_the_poll_remembers_the_status() -> None:
    with spawn(STAND_IN, "m:latest") as process:
        assert process.status is None
        process.wait_ready(math.inf)
        assert process.status is not None
        assert process.status.context_length == 8192


def test_an_end_that_is_not_ours_is_told() -> None:
    told: queue.Queue[str] = queue.Queue()
    process = run("import time; time.sleep(60)")
    process.tell_end(told.put)
    os.kill(process.pid, signal.SIGKILL)
    assert told.get(timeout=10) == "signal: killed"
    process.close()
    process.tell_end(told.put)
    assert told.get(timeout=10) == "signal: killed", "close came after the end"
    process = run("pass")
    process.tell_end(told.put)
    assert told.get(timeout=10) == "exit status 0"


@pytest.mark.parametrize("end", [Process.close, Process.kill])
def test_an_end_that_is_ours_is_not_told(end: Callable[[Process], object]) -> None:
    told: queue.Queue[str] = queue.Queue()
    process = run("import time; time.sleep(60)")
    process.tell_end(told.put)
    end(process)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
