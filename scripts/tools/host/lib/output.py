"""A host's reading of its runner's output, for every version of hosts (docs/internals/wire.md, 1.6).

A table of rules, apart from the generations of the wire: a rule says which outputs are read, what is remembered of
them, and whose errors that text replaces. A generation whose releases span several rules lists them all.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

MARKERS = (
    *("mlx:", "MLX:", "panic:", "fatal error:", "error:", "Error:", "CUDA error", "ROCm error", "cudaMalloc failed"),
    *('"ERR"', "error loading model", "GGML_ASSERT", "Deepseek2 does not support K-shift"),
    *("signal arrived during cgo execution", "llama_init_from_model:"),
)
OUT_OF_MEMORY = (
    *("out of memory", "out of device memory", "cudamalloc failed", "hipmalloc failed", "failed to allocate"),
    *("allocation failed", "not enough memory", "insufficient memory", "vk_error_out_of_device_memory"),
    "erroroutofmemory",
)
SCANNED_LINE_BYTES = 65536
"""Go's `bufio.Scanner` takes lines of at most this, newline included; at a longer one it stops for good."""
_KEPT_BYTES = 8192
_KEPT_LINE_BYTES = 256


def capture(line: str) -> str | None:
    """The part of one line that hosts since v0.30.0 remember: from the earliest marker on, or a whole OOM line."""
    at = _earliest_marker(line)
    if at is not None:
        return line[at:]
    return line if is_out_of_memory(line) else None


def is_out_of_memory(text: str) -> bool:
    """True if a host that reads this in an error unloads every model."""
    lower = text.lower()
    return any(phrase in lower for phrase in OUT_OF_MEMORY)


def _earliest_marker(text: str) -> int | None:
    return min((at for marker in MARKERS if (at := text.find(marker)) >= 0), default=None)


class Capture(Protocol):
    """Remembers something of the output that it is fed."""

    captured: str

    def feed(self, chunk: bytes) -> bool:
        """One read from the pipe; False when this host reads no more of it."""

    def end(self) -> None:
        """The pipe has ended."""


class LastScannedLine:
    """The last line, even an empty one; a line that is too long ends the reading, and the runner blocks on its pipe."""

    def __init__(self) -> None:
        self.captured = ""
        self._rest = b""

    def feed(self, chunk: bytes) -> bool:
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = b""
        for line in lines:
            if len(line) >= SCANNED_LINE_BYTES:
                return False
            self.captured = line.removesuffix(b"\r").decode(errors="replace")
        if len(rest) >= SCANNED_LINE_BYTES:
            return False
        self._rest = rest
        return True

    def end(self) -> None:
        if self._rest:
            self.captured = self._rest.removesuffix(b"\r").decode(errors="replace")


class LastLineStart:
    """The first 256 bytes of the last line that is not blank; an unfinished shorter line does not count."""

    def __init__(self) -> None:
        self.captured = ""
        self._rest = b""
        self._discarding = False

    def feed(self, chunk: bytes) -> bool:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not self._discarding and (text := line.strip()):
                self._keep(text)
            self._discarding = False
        if len(self._rest) > _KEPT_LINE_BYTES:
            if not self._discarding:
                self._keep(self._rest[:_KEPT_LINE_BYTES].strip())
                self._discarding = True
            self._rest = b""
        return True

    def _keep(self, line: bytes) -> None:
        self.captured = line[:_KEPT_LINE_BYTES].decode(errors="replace")

    def end(self) -> None:
        """Nothing: the rest without a newline is lost."""


class Accumulated:
    """The results of `find` for all chunks, joined by newlines; above 8 KiB the oldest lines are dropped."""

    def __init__(self, find: Callable[[bytes], list[str]]) -> None:
        self.captured = ""
        self._find = find

    def feed(self, chunk: bytes) -> bool:
        for text in self._find(chunk):
            self.captured = f"{self.captured}\n{text}" if self.captured else text
            kept = self.captured.encode()
            if len(kept) > _KEPT_BYTES:
                tail = kept[-_KEPT_BYTES:].decode(errors="ignore")
                self.captured = tail.partition("\n")[2] if "\n" in tail else tail
        return True

    def end(self) -> None:
        """Nothing: a chunk is judged as it comes."""


def _first_marker(chunk: bytes) -> list[str]:
    """From the earliest marker in the whole chunk to the end of its line."""
    text = chunk.decode(errors="replace")
    at = _earliest_marker(text)
    return [] if at is None else [text[at:].partition("\n")[0].rstrip(" \t\r")]


def _every_line(chunk: bytes) -> list[str]:
    """Each line of the chunk by itself; a line cut by a read is judged in pieces."""
    lines = (piece.decode(errors="replace").rstrip(" \t\r") for piece in chunk.split(b"\n"))
    return [found for line in lines if (found := capture(line))]


@dataclass(frozen=True)
class Rule:
    """The way in which the hosts of some releases read their runner."""

    name: str
    releases: str
    start: Callable[[], Capture] = field(repr=False)
    separate: bool = False
    """Stdout and stderr are two pipes and only stderr is remembered; the exit does not wait for their end."""
    scans_stdout: bool = False
    """Stdout is read by lines too, so that a line that is too long stops that pipe as well."""
    in_requests: bool = True
    """True if the text replaces errors of requests as well as those of loading."""


SCANNED_BOTH = Rule(
    "last stderr line, both scanned", "v0.16.2", LastScannedLine, separate=True, scans_stdout=True, in_requests=False
)
SCANNED = Rule("last stderr line, scanned", "v0.17.4-v0.18.2", LastScannedLine, separate=True, in_requests=False)
LAST_STDERR = Rule("last stderr line, 256 bytes", "v0.18.3-v0.22.x", LastLineStart, separate=True)
LAST_OF_BOTH = Rule("last line, 256 bytes", "v0.23.0", LastLineStart)
FIRST_MARKER = Rule("first marker of a chunk", "v0.23.1-v0.25.0-rc0", lambda: Accumulated(_first_marker))
EVERY_LINE = Rule("every marked line", "v0.30.0 and later", lambda: Accumulated(_every_line))
RULES = (SCANNED_BOTH, SCANNED, LAST_STDERR, LAST_OF_BOTH, FIRST_MARKER, EVERY_LINE)


class OutputScanner:
    """Everything the runner wrote and what was captured of it. Fed by one thread for each pipe, read by any."""

    def __init__(self, rule: Rule = EVERY_LINE) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._written = bytearray()
        self._capture = rule.start()

    def feed(self, chunk: bytes) -> bool:
        """One read from the pipe that is remembered. False when this host reads no more of it."""
        with self._lock:
            self._written += chunk
            return self._capture.feed(chunk)

    def pass_through(self, chunk: bytes) -> None:
        """One read from a stdout that has a pipe of its own: shown, never remembered."""
        with self._lock:
            self._written += chunk

    def end(self) -> None:
        """The pipe that is remembered has ended."""
        with self._lock:
            self._capture.end()

    @property
    def captured(self) -> str:
        """The text that would replace that of a later error; empty as long as nothing matched."""
        with self._lock:
            return self._capture.captured

    @property
    def text(self) -> str:
        with self._lock:
            return self._written.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()
