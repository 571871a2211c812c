"""A runner process as a host starts, watches and ends it (protocol.md 1.2-1.7). No asyncio in here: the process
outlives any event loop, and hosts watch it from a thread of its own as well."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.host.answers import UndecodableError, decode_status
from tests.host.generations import F, Generation
from tests.host.libraries import library_environment
from tests.host.output import OutputScanner

POLL_S = 0.1
_READ_BYTES = 32768


class LoadError(Exception):
    """The runner did not become ready. The text is what the host tells its user."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(
    executable: Sequence[str],
    model: str,
    *,
    models_dir: Path | str | None = None,
    generation: Generation = F,
    port: int | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    libraries: Path | None = None,
    cwd: Path | None = None,
) -> "Process":
    """Starts `executable` (one or more words) for `model` with the argv of `generation`, plus our own `arguments`.

    The environment is a full copy of ours, plus `OLLAMA_MODELS`, the variables for the host's library directory
    `libraries`, and `environment`. Both outputs go into one pipe, stdin is the null device.
    """
    port = free_port() if port is None else port
    variables = dict(os.environ)
    if models_dir is not None:
        variables["OLLAMA_MODELS"] = str(models_dir)
    if libraries is not None:
        variables |= library_environment(libraries, variables)
    variables |= environment or {}
    return Process([*executable, *generation.argv(model, port), *arguments], port, generation, variables, cwd)


class Process:
    """One spawned runner and the thread that reads its output.

    Like a host, it takes the process for exited once the pipe has reached its end *and* the child is reaped; a
    grandchild that keeps the pipe open therefore keeps it alive.
    """

    def __init__(
        self,
        argv: Sequence[str],
        port: int,
        generation: Generation = F,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.argv = list(argv)
        self.port = port
        self.generation = generation
        self.output = OutputScanner()
        self.started = time.monotonic()
        self._popen = subprocess.Popen(
            self.argv,
            env=None if environment is None else dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        self._exited = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"output of {self.pid}")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None until exited; negative for a signal."""
        return self._popen.returncode if self._exited.is_set() else None

    def _read(self) -> None:
        pipe = self._popen.stdout
        assert pipe is not None
        with pipe:
            while chunk := os.read(pipe.fileno(), _READ_BYTES):
                self.output.feed(chunk)
        self._popen.wait()
        self._exited.set()

    def poll_ready(self, timeout_s: float | None = None) -> bool:
        """One poll: did the generation's readiness path answer 200 with a body that decodes?"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", self.generation.ready_path, headers={"User-Agent": "Go-http-client/1.1"})
            response = connection.getresponse()
            body = response.read()
            if response.status == 308:
                connection.request("GET", response.headers["Location"])
                response = connection.getresponse()
                body = response.read()
            if response.status != 200:
                return False
            if self.generation.ready_decodes:
                decode_status(body)
        except (OSError, http.client.HTTPException, UndecodableError):
            return False
        finally:
            connection.close()
        return True

    def wait_ready(self, timeout_s: float = 300.0) -> float:
        """Polls every 100 ms until ready and returns the seconds since the start. Raises `LoadError`."""
        deadline = self.started + timeout_s
        while True:
            time.sleep(POLL_S)
            remaining = deadline - time.monotonic()
            if self._exited.is_set():
                raise LoadError(self._exit_text())
            if remaining <= 0:
                captured = self.output.captured
                raise LoadError(
                    f"timeout waiting for mlx runner: {captured}"
                    if captured
                    else "timeout waiting for mlx runner to start"
                )
            if self.poll_ready(remaining):
                return time.monotonic() - self.started

    def _exit_text(self) -> str:
        status = self._popen.returncode
        how = f"signal: {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        if self.output.captured:
            return f"mlx runner failed: {self.output.captured} (exit: {how})"
        return f"mlx runner exited unexpectedly: {'%!w(<nil>)' if status == 0 else how}"

    def send_signal(self, number: int) -> None:
        """To the runner alone; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None if it has not exited (pipe included) within `timeout_s`."""
        self._exited.wait(timeout_s)
        return self.exit_status

    def close(self) -> float:
        """Ends it as its generation's host does; returns how long that took in seconds."""
        started = time.monotonic()
        if self.generation.close_grace_s:
            self.send_signal(signal.SIGINT)
            if self.wait(self.generation.close_grace_s) is not None:
                return time.monotonic() - started
        self.kill()
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL. The host does not wait for the end; we do, up to 5 s, so that nothing is left behind."""
        self.send_signal(signal.SIGKILL)
        self._exited.wait(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
