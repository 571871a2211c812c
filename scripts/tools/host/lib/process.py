"""A runner process as a host starts, watches and ends it (docs/internals/wire.md, 1.2-1.7).

No asyncio in here: the process outlives any event loop, and hosts watch it from a thread of its own as well.
"""

import contextlib
import gzip
import http.client
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self
from urllib.parse import urlsplit

from scripts.tools.host.lib.answers import Status, UndecodableError, decode_status
from scripts.tools.host.lib.generations import F, Generation
from scripts.tools.host.lib.golang import signal_name
from scripts.tools.host.lib.output import LastScannedLine, OutputScanner

POLL_S = 0.1
_READ_BYTES = 32768
_DRAIN_S = 0.05
_REDIRECTS = (301, 302, 303, 307, 308)

Copy = Callable[[bytes], object]


def write_decoys(directory: Path) -> Path:
    """Makes `mlx_cuda_v13` with headers and a libmlx.so that has nothing in it, as bad as a host's older one.

    Returns `directory`, for `spawn(libraries=...)`.
    """
    backend = directory / "mlx_cuda_v13"
    (backend / "include").mkdir(parents=True)
    library = backend / "libmlx.so"
    compiler = shutil.which("cc")
    if compiler is None:
        library.write_bytes(b"not a library")
    else:
        source = directory / "empty.c"
        source.write_text("int mlx_decoy(void) { return 0; }\n")
        command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libmlx.so", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
    return directory


def library_environment(directory: Path, inherited: Mapping[str, str], *, cuda_headers: bool = True) -> dict[str, str]:
    """The variables that a Linux host sets when `directory` is its `lib/ollama`.

    `cuda_headers` is false for hosts before v0.19.0.
    """
    backends = sorted(directory.glob("mlx_*"))
    previous = [inherited["LD_LIBRARY_PATH"]] if inherited.get("LD_LIBRARY_PATH") else []
    environment = {"LD_LIBRARY_PATH": os.pathsep.join([str(directory), *map(str, backends), *previous])}
    with_headers = (path for path in backends if path.name.startswith("mlx_cuda_") and (path / "include").exists())
    if cuda_headers and (first := next(with_headers, None)):
        environment |= {"CUDA_PATH": str(first), "CUDA_HOME": str(first)}
    return environment


class LoadError(Exception):
    """The runner did not become ready. The text is what the host tells its user."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rss_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    if sys.platform == "linux":
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True).stdout) * 1024


def descriptors(pid: int) -> int | None:
    """Returns the number of open file descriptors; None where the system does not tell."""
    directory = Path(f"/proc/{pid}/fd")
    return len(list(directory.iterdir())) if directory.is_dir() else None


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
    copy_to: Copy | None = None,
) -> "Process":
    """Starts `executable` (one or more words) for `model` with the argv of `generation`, plus our own `arguments`.

    The environment is a full copy of ours, plus `OLLAMA_MODELS`, the variables for the host's library directory
    `libraries`, and `environment`. Stdin is the null device. The outputs are read by the newest rule of the generation;
    `copy_to` gets all that was read, as the host's own stderr does.
    """
    port = free_port() if port is None else port
    variables = dict(os.environ)
    if models_dir is not None:
        variables["OLLAMA_MODELS"] = str(models_dir)
    if libraries is not None:
        variables |= library_environment(libraries, variables, cuda_headers=generation.cuda_headers)
    variables |= environment or {}
    argv = [*executable, *generation.argv(model, port), *arguments]
    return Process(argv, port, generation, variables, cwd, copy_to)


class Process:
    """One spawned runner and the threads that read its output.

    Like a host with one pipe for both outputs, it takes the process for exited once the pipe has reached its end *and*
    the child is reaped; a grandchild that keeps the pipe open therefore keeps it alive. A host with two pipes closes
    them as soon as the child is reaped. What lies in them then is lost to such a host now and then; here it is read.
    """

    def __init__(
        self,
        argv: Sequence[str],
        port: int,
        generation: Generation = F,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        copy_to: Copy | None = None,
    ) -> None:
        self.argv = list(argv)
        self.port = port
        self.generation = generation
        self.output = OutputScanner(generation.rule)
        self.started = time.monotonic()
        self.status: Status | None = None
        """The status from the last poll that could be decoded."""
        self._sent: set[int] = set()
        """The signals by which we ended it while it lived."""
        self._copy = copy_to or (lambda _: None)
        separate = self.output.rule.separate
        self._popen = subprocess.Popen(
            self.argv,
            env=None if environment is None else dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate else subprocess.STDOUT,
            bufsize=0,
        )
        self._exited = threading.Event()
        self._reaped = threading.Event()
        watch = self._watch_two if separate else self._watch_one
        threading.Thread(target=watch, daemon=True, name=f"output of {self.pid}").start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None until exited; negative for a signal."""
        return self._popen.returncode if self._exited.is_set() else None

    def _watch_one(self) -> None:
        pipe = self._popen.stdout
        assert pipe is not None
        with pipe:
            while chunk := os.read(pipe.fileno(), _READ_BYTES):
                self._copy(chunk)
                self.output.feed(chunk)
        self.output.end()
        self._popen.wait()
        self._exited.set()

    def _watch_two(self) -> None:
        stdout, stderr = self._popen.stdout, self._popen.stderr
        assert stdout is not None
        assert stderr is not None
        lines = LastScannedLine() if self.output.rule.scans_stdout else None

        def pass_through(chunk: bytes) -> bool:
            self.output.pass_through(chunk)
            return lines is None or lines.feed(chunk)

        with stdout, stderr:
            reader = threading.Thread(target=self._read, args=(stdout, pass_through), daemon=True)
            remembering = threading.Thread(target=self._read, args=(stderr, self.output.feed), daemon=True)
            reader.start()
            remembering.start()
            self._popen.wait()
            self._reaped.set()
            reader.join()
            remembering.join()
        self.output.end()
        self._exited.set()

    def _read(self, pipe: IO[bytes], take: Callable[[bytes], bool]) -> None:
        """Until the end of the pipe, the end of the process, or the end of this host's patience."""
        while True:
            readable, _, _ = select.select([pipe], [], [], _DRAIN_S)
            if not readable:
                if self._reaped.is_set():
                    return
                continue
            chunk = os.read(pipe.fileno(), _READ_BYTES)
            self._copy(chunk)
            if not chunk or not take(chunk):
                return

    def poll_ready(self, timeout_s: float | None = None) -> bool:
        """One poll: did the generation's readiness path answer 200 with a body that decodes?

        A host has no timeout here: a runner that accepts and never answers holds it for ever.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"User-Agent": "Go-http-client/1.1", "Accept-Encoding": "gzip"}
        path = self.generation.ready_path
        try:
            for _ in range(10):
                connection.request("GET", path, headers=headers)
                response = connection.getresponse()
                body = response.read()
                if response.status not in _REDIRECTS:
                    break
                path = urlsplit(response.headers.get("Location", "")).path
            if response.status != 200:
                return False
            if self.generation.ready_decodes:
                self.status = decode_status(
                    gzip.decompress(body) if response.headers.get("Content-Encoding") == "gzip" else body
                )
        except (OSError, EOFError, http.client.HTTPException, UndecodableError):
            return False
        finally:
            connection.close()
        return True

    def try_ready(self, timeout_s: float | None = None) -> bool:
        """One turn of the host's loop, `POLL_S` after the last; `timeout_s` is that of the whole load, by default the
        generation's. Raises `LoadError` when the process is gone or the time is up."""
        timeout_s = self.generation.load_timeout_s if timeout_s is None else timeout_s
        remaining = self.started + timeout_s - time.monotonic()
        captured = self.output.captured
        if self._exited.is_set():
            raise LoadError(self._exit_text())
        if remaining <= 0:
            suffix = f": {captured}" if captured else " to start"
            raise LoadError(f"timeout waiting for mlx runner{suffix}")
        return self.poll_ready(remaining if remaining < math.inf else None)

    def wait_ready(self, timeout_s: float | None = None, poll_s: float = POLL_S) -> float:
        """Polls until ready, every 100 ms as Ollama does, and returns the seconds since the start. Raises
        `LoadError`."""
        while True:
            time.sleep(poll_s)
            if self.try_ready(timeout_s):
                return time.monotonic() - self.started

    def tell_end(self, tell: Callable[[str], object]) -> None:
        """Has `tell` called, by another thread, with how it ended, such as `signal: killed`, unless we end it.

        A signal that is not ours is told even then: the end of a connection, after which a host may close the runner,
        is seen before the end of the process.
        """

        def wait() -> None:
            self._exited.wait()
            status = self._popen.returncode
            if not self._sent or (status < 0 and -status not in self._sent):
                tell(self._how())

        threading.Thread(target=wait, daemon=True, name=f"end of {self.pid}").start()

    def _how(self) -> str:
        status = self._popen.returncode
        return f"signal: {signal_name(-status)}" if status < 0 else f"exit status {status}"

    def _exit_text(self) -> str:
        status, how = self._popen.returncode, self._how()
        if captured := self.output.captured:
            return f"mlx runner failed: {captured} (exit: {'<nil>' if status == 0 else how})"
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
            self._end(signal.SIGINT)
            if self.wait(self.generation.close_grace_s) is not None:
                return time.monotonic() - started
        self.kill()
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL. The host does not wait for the end; we do, up to 5 s, so that nothing is left behind."""
        self._end(signal.SIGKILL)
        self._exited.wait(5)

    def _end(self, number: int) -> None:
        if self._popen.poll() is None:
            self._sent.add(number)
        self.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
