"""Log lines in the format of Ollama's own runner, safe for the host that scans them.

A host reads stdout and stderr of the runner as one pipe and keeps every line with one of its markers (`error:`, `mlx:`,
`out of memory`, ...). The host later shows such a line in place of unrelated errors. So only the last line of the
process (`fatal`) contains a marker. Each line is one write of at most `LINE_LIMIT` bytes, and is dropped if the host
does not read.
"""

import faulthandler
import logging
import os
import re
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from datetime import datetime
from typing import NoReturn

from runner.errors import RankError, RunnerError
from runner.terminal import STATUS_LINE
from runner.versions import misfits, remedy

TRACE = 5
_STDERR = 2
_FATAL_WAIT_MS = 500
LINE_LIMIT = 4096  # bytes; a pipe accepts as many in one write once poll() says that it is writable

_MARKERS = (
    "mlx:",
    "MLX:",
    "panic:",
    "fatal error:",
    "error:",
    "Error:",
    "CUDA error",
    "ROCm error",
    "cudaMalloc failed",
    '"ERR"',
    "error loading model",
    "GGML_ASSERT",
    "Deepseek2 does not support K-shift",
    "signal arrived during cgo execution",
    "llama_init_from_model:",
)
_OUT_OF_MEMORY = (
    "out of memory",
    "out of device memory",
    "cudamalloc failed",
    "hipmalloc failed",
    "failed to allocate",
    "failed to reserve graph",
    "allocation failed",
    "not enough memory",
    "insufficient memory",
    "vk_error_out_of_device_memory",
    "erroroutofmemory",
)
_ANY_PHRASE = re.compile(f"(?i:{'|'.join(map(re.escape, _OUT_OF_MEMORY))})")
_ANY_MARKER = re.compile(f"{'|'.join(map(re.escape, _MARKERS))}|{_ANY_PHRASE.pattern}")
_NO_MEMORY = re.compile(r"Unable to allocate|Insufficient Memory|OutOfMemory|out of memory")
"""The texts of MLX's RuntimeErrors for missing memory, on Metal or CUDA. Errors for an array beyond any limit, or for
too many arrays, do not match: a host cannot help by unloading other models."""
_LEVELS = {TRACE: "TRACE", logging.WARNING: "WARN"}  # slog's names that differ from Python's
_PLAIN_VALUE = re.compile(r'[^\s="\x00-\x1f\x7f]+')

Value = str | int | float | bool
_marks: dict[str, Value] = {}
_ending = threading.Lock()
"""The lock that the thread which writes the last line never releases: a process has only one last line."""


def harmless(text: str) -> str:
    """Returns the text with every marker respelled, so that the host's scanner does not find it."""
    return _respelled(_ANY_MARKER, text)


def lacks_memory(error: BaseException) -> bool:
    """Returns True if the error says that memory was missing. Never raises."""
    try:
        return isinstance(error, MemoryError) or (type(error) is RuntimeError and bool(_NO_MEMORY.search(str(error))))
    except Exception:
        return False


def exception_line(error: BaseException) -> str:
    """Returns the exception as a line for the host. The line has `out of memory` if, and only if, memory was missing: a
    host that reads these words unloads all its models. Never raises."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if lacks_memory(error):
        return f"out of memory: {line}"
    return _respelled(_ANY_PHRASE, line)


def _respelled(marker: re.Pattern[str], text: str) -> str:
    while marker.search(text):
        text = marker.sub(_respell, text)
    return text


def _respell(match: re.Match[str]) -> str:
    marker = match[0]
    if marker.endswith(":"):
        return f"{marker[:-1]} :"
    if " " in marker:
        return marker.replace(" ", "-")
    if '"' in marker:
        return marker.replace('"', "'")
    return f"{marker[0]}-{marker[1:]}"


def _quoted(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = harmless(f"{value:.6g}" if isinstance(value, float) else str(value))
    if _PLAIN_VALUE.fullmatch(text) and text.isprintable():
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(quoted)}"'


def printable(text: str) -> str:
    """Returns the text with an escape in place of every character that a terminal would obey or not show."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    if short := {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character):
        return short
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


class _Slog(logging.Formatter):
    """`time=... level=INFO source=file.py:12 msg="..." key=value`"""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        level = _LEVELS.get(record.levelno, record.levelname)
        attributes: dict[str, Value] = _marks | getattr(record, "attributes", {})
        if record.exc_info and record.exc_info[0] is not None:
            attributes["trace"] = "".join(traceback.format_exception(*record.exc_info)).strip()
        fields = [f"time={time}", f"level={level}", f"source={record.filename}:{record.lineno}"]
        fields.append(f"msg={_quoted(record.getMessage())}")
        fields += [f"{key}={_quoted(value)}" for key, value in attributes.items()]
        return harmless(" ".join(fields))


class _Pipe(logging.Handler):
    """Writes each record to stderr by one write(2); never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._poll = select.poll()
        self._poll.register(_STDERR, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # a fault in logging must not end the code that logs
            text = f'level=ERROR source={record.filename}:{record.lineno} msg="a line that could not be made"'
        line = text.encode(errors="backslashreplace")[: LINE_LIMIT - 1] + b"\n"
        with suppress(OSError):  # the host has ended, so nobody reads stderr
            if self._poll.poll(0):
                STATUS_LINE.write(line)


class Log:
    """A logger whose methods get a line's attributes as keywords: `log.info("model loaded", bytes=12)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _write(self, level: int, message: str, attributes: dict[str, Value], trace: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"attributes": attributes}, stacklevel=3, exc_info=trace)

    def trace(self, message: str, /, **attributes: Value) -> None:
        self._write(TRACE, message, attributes)

    def debug(self, message: str, /, **attributes: Value) -> None:
        self._write(logging.DEBUG, message, attributes)

    def info(self, message: str, /, **attributes: Value) -> None:
        self._write(logging.INFO, message, attributes)

    def warning(self, message: str, /, **attributes: Value) -> None:
        self._write(logging.WARNING, message, attributes)

    def exception(self, message: str, /, **attributes: Value) -> None:
        """Logs a fault, with the traceback of the exception being handled."""
        self._write(logging.ERROR, message, attributes, trace=True)


def mark(**attributes: Value) -> None:
    """Adds these attributes to every line from now on."""
    _marks.update(attributes)


def start(level: int) -> None:
    """Writes all logs, warnings and uncaught exceptions as slog lines on stderr, through one handler."""
    handler = _Pipe()
    handler.setFormatter(_Slog())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("asyncio").setLevel(max(level, logging.INFO))
    sys.unraisablehook = _unraisable
    _enable_crash_reports()


def _enable_crash_reports() -> None:
    """Makes a crash write the stack of each thread. MLX crashes, for example, on a CPU that cannot allocate. The host
    then reads `error: Segmentation fault`."""
    try:
        # Opens the same pipe again, without blocking, so that a full pipe does not delay the end (on Linux).
        crashes = os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # not Linux, or stderr is a socket or another user's terminal
        crashes = _STDERR
    faulthandler.enable(crashes)
    # Not for an abort: its reason is printed before, and older hosts keep only the last line.
    signal.signal(signal.SIGABRT, signal.SIG_DFL)


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    error = unraisable.exc_value
    if error is not None:
        logging.getLogger(__name__).error("ignored exception", exc_info=error)


def die(error: BaseException, status: int = 1, *, before: str = "") -> NoReturn:
    """Ends the process with `error` as its last line, after the words `before`. The error's advice is logged before,
    because hosts report the last line. A RankError begins on a new line: MLX's ring may be writing about lost peers."""
    if isinstance(error, RunnerError) and error.advice:
        logging.getLogger(__name__).warning("what to do: %s", error.advice)
    cause = cause_of(error)
    text = before + (str(error) if isinstance(error, RunnerError) else exception_line(error))
    if isinstance(cause, ImportError | AttributeError | TypeError) and (found := misfits()):  # an old MLX lacks a name
        text = f"{found}: {remedy()}; {text.removesuffix(f'; {remedy()}')}"
    fatal(text, status, apart=isinstance(error, RankError), no_memory=lacks_memory(cause))


def cause_of(error: BaseException) -> BaseException:
    """Returns the cause from which a RunnerError was raised; for any other error, the error itself."""
    while isinstance(error, RunnerError) and (cause := error.__cause__) is not None and cause is not error:
        error = cause
    return error


def fatal(text: str, status: int = 1, *, apart: bool = False, no_memory: bool = False) -> NoReturn:
    """Ends the process with its last line, `Error: <text>`, which a host reports to its user. With `apart`, the line
    begins on a new line, because other code writes its lines piece by piece.

    The text may hold names from a model's files. So characters that a terminal would obey are escaped, and words about
    missing memory are respelled unless `no_memory` is True.
    """
    said = " ".join(text.split())
    said = printable(said if no_memory else _respelled(_ANY_PHRASE, said))
    line = f"Error: {said}".encode()[: LINE_LIMIT - 1] + b"\n"
    try:
        first = _ending.acquire(timeout=2 * _FATAL_WAIT_MS / 1000)
        output = select.poll()
        output.register(_STDERR, select.POLLOUT)
        if first and output.poll(_FATAL_WAIT_MS):  # a host that does not read must not delay the end
            os.write(_silent_stderr(), STATUS_LINE.blank + b"\n" * apart + line)
    finally:
        os._exit(status)


def _silent_stderr() -> int:
    """Returns a descriptor of stderr for the last line. From now on, output of other threads to stderr is lost."""
    with suppress(OSError):
        os.lseek(_STDERR, 0, os.SEEK_END)  # another process may have written its crash into the same file
    try:
        own, null = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, _STDERR)
    except OSError:  # no descriptors are left
        return _STDERR
    return own
