"""What the process was told at its start. `cli` makes it from flags and environment, everything else only reads it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from runner.sizes import Bound

DEFAULT_CONTEXT_TOKENS = 32768
"""The context of a model that does not tell its own."""
DEFAULT_MAX_GAP_MS = 100
GPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS = 2048, 128
"""Of a prompt, per forward: on a CPU larger chunks are no faster, and much larger ones slower."""
DTYPES = ("auto", "keep", "float32", "bfloat16", "float16")
"""What may become of floating-point weights."""
HAND_OVER = ("auto", "refused", "off")
"""The extents of a hand-over to Ollama's own runner."""
CACHE_PERCENT = 25
"""The share of memory that the prefix cache may take where nobody says how much, and that weights leave to it."""
MEMORY_PERCENT = 75
"""The share of the device's memory that everything together may take where nobody says how much."""
DEFAULT_PARALLEL = 4
"""How many requests run at once where nobody says how many."""

Start = Literal["descriptor", "symlink"]
"""How Ollama is started, so that it finds the shim afterwards (runner/ollama/launcher.py)."""


class OllamaRunner(msgspec.Struct, frozen=True, kw_only=True):
    """Ollama's own runner, which `scripts/ollama-serve` would have let the host start but for this one."""

    command: tuple[str, ...]
    """Ollama's executable and the words that the host has given to its runner."""
    environ: Mapping[str, str]
    """As the host has given it to its runner."""
    libraries: Path | None = None
    """Ollama's `lib/ollama`, with its MLX libraries; None: it has none."""
    media: frozenset[str] = frozenset()
    """The packages of Ollama's sources whose models take pictures or sound."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One runner's settings. Units stand in the names."""

    model: str
    port: int
    models_dir: Path
    context_tokens: int | None = None
    """The most that a context may hold; None: as much as the model says."""
    verify: bool = False
    dtype: str = "auto"
    """One of DTYPES."""
    memory: Bound = Bound(percent=MEMORY_PERCENT)
    """Of everything together: weights, caches, and what computing takes meanwhile; of the memory that the device lends,
    or, on a CPU, of what the machine has available at the start."""
    cache: str
    cache_memory: Bound = Bound()
    """Of everything the prefix cache holds, live and paged out; of the memory that the device lends."""
    kv_bits: int | None = None
    """None: keys and values as the model computes them."""
    parallel: int = DEFAULT_PARALLEL
    """The most requests that run at once; a cache that keeps no more than one conversation runs one."""
    max_gap_s: float = DEFAULT_MAX_GAP_MS / 1000
    """The longest that a running answer is held up between two tokens while prompts are read."""
    prefill_chunk_tokens: int | None = None
    """Of a prompt, per forward, while no answer is written; None: what suits the device."""
    blas: str
    blas_threads: int
    trace: Path | None = None
    """Where to write what the engine spends its time on."""
    inspect_text: bool = False
    """Whether `/v1/cache`, and the page, show the beginnings of prompts."""
    log_level: int
    watch_parent: bool
    hosted: bool = False
    """Whether a host has started it, and not a person."""
    hand_over: str = HAND_OVER[0]
    """One of HAND_OVER."""
    ollama: OllamaRunner | None = None
    """The one to hand over to; None: no launcher has told of any."""
    warnings: tuple[str, ...] = ()
    """Environment variables that are ignored, and why; for the log."""


def context_limit(own_tokens: int, wanted_tokens: int | None) -> int:
    """How many tokens a context may hold: `own_tokens` is what the model says (0: nothing), never exceeded."""
    if own_tokens <= 0:
        return wanted_tokens or DEFAULT_CONTEXT_TOKENS
    return min(own_tokens, wanted_tokens or own_tokens)


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner ollama serve`."""

    ollama: str | None = None
    """The name or path of Ollama's executable; None: `ollama`, from PATH."""
    words: Sequence[str] = ("serve",)
    """Ollama's arguments."""
    runner: str | None = None
    """The command of another runner, as a shell would read it; None: this runner's."""
    start: Start | None = None
    """None: as suits this system."""


class TopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `mlx-runner top` was asked for."""

    url: str
    """Of the runner: `http://host:port`."""
    once: bool = False
    log_level: int


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `mlx-runner check` was asked for."""

    model: str
    models_dir: Path
    context_tokens: int | None = None
    verify: bool = False
    dtype: str = "auto"
    memory: Bound = Bound(percent=MEMORY_PERCENT)
    blas: str = "auto"
    blas_threads: int = 1
    json: bool = False
    log_level: int
