"""`--verify`: compares the blobs of a store with the digests in their names, at one or two seconds a gigabyte."""

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

_THREADS = 2  # a core hashes slower than a disk reads, and hashing releases the GIL
_CHUNK_BYTES = 1 << 20


def verify_digests(
    checkpoint: ModelCheckpoint, tensors: Iterable[LogicalTensor], report: ReportFault = raise_fault
) -> None:
    """Compares the name of each blob that holds some of `tensors` or a text file with the SHA-256 of the blob.

    Reports a ModelError for each mismatch, in any order, and stops if `report` raises. Logs the progress, or that a
    directory has no digests.
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
            # The largest come first, so that the threads end together.
            order = sorted(blobs, key=lambda blob: (-sizes[blob], blob.path))
            for future in as_completed([pool.submit(_fault, blob, blobs[blob], progress, stopped) for blob in order]):
                fault = future.result()
                if fault is not None:
                    report(fault)
        finally:
            stopped.set()
    log.info("verified", blobs=len(blobs), bytes=progress.total, seconds=progress.seconds)


def _size(blob: File) -> int:
    """Returns the size in bytes; 0 for a missing file, which opening the model reports."""
    try:
        return blob.path.stat().st_size
    except OSError:
        return 0


def _fault(blob: File, names: Sequence[str], progress: Progress, stopped: threading.Event) -> ModelError | None:
    """Returns the fault in the content of one blob, which holds the tensors or files `names`, or None. A blob that
    cannot be opened has none: opening the model reports it."""
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
