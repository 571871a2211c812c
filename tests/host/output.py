"""What a host makes of its runner's output: the status writer of v0.30.0 and later (protocol.md 1.6)."""

import threading

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
_KEPT_BYTES = 8192


def capture(line: str) -> str | None:
    """The part of one line that the host remembers as an error: from the earliest marker on, or a whole OOM line."""
    found = [at for marker in MARKERS if (at := line.find(marker)) >= 0]
    if found:
        return line[min(found) :]
    lower = line.lower()
    return line if any(phrase in lower for phrase in OUT_OF_MEMORY) else None


class OutputScanner:
    """Everything the runner wrote and what was captured of it. Fed by one thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written = bytearray()
        self._captured = ""

    def feed(self, chunk: bytes) -> None:
        """One read from the pipe. As in the host, a line cut by a read is scanned in pieces."""
        with self._lock:
            self._written += chunk
            for piece in chunk.split(b"\n"):
                line = piece.decode(errors="replace").rstrip(" \t\r")
                captured = capture(line) if line else None
                if captured is not None:
                    self._captured = f"{self._captured}\n{captured}" if self._captured else captured
            if len(self._captured.encode()) > _KEPT_BYTES:
                tail = self._captured.encode()[-_KEPT_BYTES:].decode(errors="ignore")
                self._captured = tail.partition("\n")[2] or tail

    @property
    def captured(self) -> str:
        """What would replace the text of a later error; empty as long as nothing matched."""
        with self._lock:
            return self._captured

    @property
    def text(self) -> str:
        """All output so far."""
        with self._lock:
            return self._written.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """All output so far, by lines."""
        return self.text.splitlines()
