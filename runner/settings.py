"""What the process was told at its start. `cli` makes it from flags and environment, everything else only reads it."""

from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One runner's settings. Units stand in the names."""

    model: str
    port: int
    models_dir: Path
    cache: str
    prefill_chunk_tokens: int
    blas: str
    blas_threads: int
    log_level: int
    watch_parent: bool
