"""What the process was told at its start. `cli` makes it from flags and environment, everything else only reads it."""

from pathlib import Path

import msgspec

from runner.sizes import Bound


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One runner's settings. Units stand in the names."""

    model: str
    port: int
    models_dir: Path
    cache: str
    cache_memory: Bound = Bound()
    """Of everything the prefix cache holds, live and paged out; of the memory that the device lends."""
    kv_bits: int | None = None
    """None: keys and values as the model computes them."""
    prefill_chunk_tokens: int
    blas: str
    blas_threads: int
    log_level: int
    watch_parent: bool
    remarks: tuple[str, ...] = ()
    """What was passed over in the environment, for the log."""
