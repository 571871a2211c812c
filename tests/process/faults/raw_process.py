"""A runner whose outputs the test chooses. (`scripts.tools.host.lib.spawn` always gives it a pipe, and reads it.)"""

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        """The HTTP status of a path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def answer_nothing(self, prompt: str) -> None:
        """Asks for a completion and expects its stream to break off."""
        try:
            self.answer(prompt)
        except (OSError, http.client.HTTPException):
            return
        raise AssertionError("the answer was complete")

    def answer(self, prompt: str, num_predict: int = 0) -> str:
        """The text of a completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = json.dumps({"Prompt": prompt, "Options": {"num_predict": num_predict}})
            connection.request("POST", "/completion", body)
            return "".join(json.loads(line)["Content"] for line in connection.getresponse().read().splitlines())
        finally:
            connection.close()


@contextmanager
def raw_process(
    models_dir: Path,
    *,
    stdout: Output,
    stderr: Output,
    executable: Sequence[str] = RUNNER,
    words: Sequence[str] = (),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    port: int | None = None,
) -> Iterator[RawProcess]:
    """Spawns the runner. `words`, such as `runner`, come before its flags; `before` runs in the child before it becomes
    the runner; `environment` replaces the whole environment."""
    port = port or free_port()
    variables = dict(os.environ) if environment is None else dict(environment)
    process = subprocess.Popen(
        [*executable, *words, "--model", MAIN, "--port", str(port), *arguments],
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
