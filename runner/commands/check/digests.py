"""For `check --verify`: compares a model's blobs with the digests in their names, in a second or two a gigabyte."""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from runner.errors import ModelError
from runner.logs import Log
from runner.model.progress import Progress
from runner.model.sources.checkpoint import File, LogicalTensor, ModelCheckpoint, ReportFault, raise_fault
from runner.model.sources.safetensors import open_file
from runner.sizes import listed

log = Log(__name__)

_THREADS = 2  # hashing on one core is slower than reading a disk, and releases Python's lock
_CHUNK_BYTES = 1 << 20


def verify_digests(
    checkpoint: ModelCheckpoint, tensors: Iterable[LogicalTensor], report: ReportFault = raise_fault
) -> None:
    """Hashes each blob that holds a text file or any of `tensors`, and compares the SHA-256 with the blob's name.

    Calls `report` with a ModelError for each mismatch, in any order, and stops if `report` raises. Logs the progress.
    For a model in a directory, which has no digests, only logs that.
    """
    if not checkpoint.from_store:
        log.info("nothing to verify: a directory has no digests", directory=str(checkpoint.path))
        return
    blobs: dict[File, list[str]] = {file: [name] for name, file in checkpoint.text_blobs.items()}
    for tensor in tensors:
        blobs.setdefault(File(tensor.weight.file), []).append(tensor.weight.key)
    sizes = {blob: _size(blob) for blob in blobs}
    progress = Progress(log, "verifying", sum(sizes.values()))
    stopped = threading.Event()  # set when the remaining results are not needed
    with ThreadPoolExecutor(_THREADS, "digest") as pool:
        try:
            # The largest blobs come first, so that both threads end at about the same time.
            order = sorted(blobs, key=lambda blob: (-sizes[blob], blob.path))
            for future in as_completed([pool.submit(_fault, blob, blobs[blob], progress, stopped) for blob in order]):
                fault = future.result()
                if fault is not None:
                    report(fault)
        finally:
            stopped.set()
    log.info("verified", blobs=len(blobs), bytes=progress.total, seconds=progress.seconds)


def _size(blob: File) -> int:
    """Returns a blob's size in bytes, 0 if it is missing. Opening the model reports missing files."""
    try:
        return blob.path.stat().st_size
    except OSError:
        return 0


def _fault(blob: File, names: Sequence[str], progress: Progress, stopped: threading.Event) -> ModelError | None:
    """Returns the fault in the content of one blob, or None. The blob holds the tensors or text files `names`. Returns
    None, too, for a blob that cannot be opened, which opening the model reports."""
    found, is_open = hashlib.sha256(), False
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with open_file(blob.path, blob.size_bytes) as (file, _):
            is_open = True
            while not stopped.is_set() and (count := file.readinto(chunk)):
                found.update(chunk[:count])
                progress.add(count)
    except ModelError as error:
        return error if is_open else None
    wanted = blob.path.name.removeprefix("sha256-").lower()
    if stopped.is_set() or found.hexdigest() == wanted:
        return None
    return ModelError(
        f"digest mismatch, file must be downloaded again: want sha256:{wanted}, got sha256:{found.hexdigest()}:"
        f" {listed(names, 1)} in {blob.path}"
    )
