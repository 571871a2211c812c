"""A runner whose outputs the test chooses. (`scripts.tools.host.lib.spawn` always gives it a pipe, and reads it.)"""

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

from scripts.tools.host.lib import free_port
from tests.process.conftest import MAIN, RUNNER

_MOST_S = 60.0
Output = int | BinaryIO | None


class RawProcess:
    """The process, with short requests to it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + _MOST_S
        while not self._is_ready():
            assert self.status is None, f"it exited with {self.status}"
            assert time.monotonic() < deadline, "it never became ready"
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return self.get("/v1/status") == 200
        except OSError:
            return False

    def get(self, path: str) -> int:
        """Returns the HTTP status of a path."""
        return self._send("GET", path)[0]

    def answer(self, prompt: str) -> str:
        """Returns the text of a completion."""
        _, body = self._send("POST", "/completion", json.dumps({"Prompt": prompt}))
        return "".join(json.loads(line)["Content"] for line in body.splitlines())

    def _send(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()


@contextmanager
def raw_process(
    models_dir: Path,
    *,
    stdout: Output,
    stderr: Output,
    executable: Sequence[str] = RUNNER,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Iterator[RawProcess]:
    """Spawns the runner. `words`, such as `runner`, come before its flags; `before` runs in the child before it becomes
    the runner; `environment` replaces the whole environment."""
    port = free_port()
    variables = dict(os.environ) if environment is None else dict(environment)
    process = subprocess.Popen(
        [*executable, *words, "--model", MAIN, "--port", str(port)],
        env={**variables, "OLLAMA_MODELS": str(models_dir)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        preexec_fn=before,
    )
    try:
        yield RawProcess(process, port)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
