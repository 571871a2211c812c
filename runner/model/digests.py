"""`--verify`: whether the blobs of a store hold what their names say. Reads all of them: a second or two a gigabyte."""

import hashlib
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from runner.errors import ModelError
from runner.logs import Log
from runner.model.checkpoint import Checkpoint, File, Report, Tensor, refuse
from runner.model.header import open_file, reason

log = Log(__name__)

_THREADS = 2  # a core hashes slower than a disk reads, and hashing lets go of the interpreter
_CHUNK_BYTES = 1 << 20
_LOG_EVERY_S = 1.0


def verify(checkpoint: Checkpoint, tensors: Iterable[Tensor], report: Report = refuse) -> None:
    """Compares the SHA-256 of each blob that `tensors` and the text files lie in with its name.

    Reports ModelError for those that differ, in any order; if that raises, the rest is left alone. Says in the log how
    far it is, or that a directory has no digests.
    """
    if not checkpoint.from_store:
        log.info("nothing to verify: a directory has no digests", directory=str(checkpoint.path))
        return
    blobs = {*checkpoint.text_blobs, *(File(part.file) for tensor in tensors for part in tensor.parts)}
    sizes = {blob: _size(blob) for blob in blobs}
    progress = _Progress(sum(sizes.values()))
    with ThreadPoolExecutor(_THREADS, "digest") as pool:
        try:
            # The largest first, so that the threads end together.
            order = sorted(blobs, key=lambda blob: (-sizes[blob], blob.path))
            for future in as_completed([pool.submit(_fault, blob, progress) for blob in order]):
                fault = future.result()
                if fault is not None:
                    report(fault)
        finally:
            progress.stopped = True
    log.info("verified", blobs=len(blobs), bytes=progress.total_bytes, seconds=progress.seconds)


class _Progress:
    """How many bytes are done. Any thread may count; whoever finds a second over writes the line."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.stopped = False
        """Set when nobody waits for the rest."""
        self._done_bytes = 0
        self._started = self._logged = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def add(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            now = time.monotonic()
            if now - self._logged < _LOG_EVERY_S:
                return
            self._logged = now
            done = self._done_bytes
        percent = 100 * done // max(1, self.total_bytes)
        log.info("verifying", percent=percent, bytes=done, total=self.total_bytes, seconds=self.seconds)


def _size(blob: File) -> int:
    """In bytes; 0 for a file that is not there, of which whoever needs it will tell."""
    try:
        return blob.path.stat().st_size
    except OSError:
        return 0


def _fault(blob: File, progress: _Progress) -> ModelError | None:
    """What is wrong with the content of one blob. One that cannot be opened is no matter of digests."""
    found = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with open_file(blob.path, blob.size_bytes) as (file, _):
            while not progress.stopped and (count := file.readinto(chunk)):
                found.update(chunk[:count])
                progress.add(count)
    except OSError as error:
        return ModelError(f"read {blob.path}: {reason(error)}")
    except ModelError:
        return None
    wanted = blob.path.name.removeprefix("sha256-").lower()
    if progress.stopped or found.hexdigest() == wanted:
        return None
    return ModelError(
        f"digest mismatch, file must be downloaded again: want sha256:{wanted}, got sha256:{found.hexdigest()}:"
        f" {blob.path}"
    )
