"""The settings of each command. `cli` makes them from flags and environment; all other code only reads them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from runner.sizes import Bound

DEFAULT_CONTEXT_TOKENS = 32768
"""The context of a model that does not state its own."""
DEFAULT_MAX_GAP_MS = 100
GPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS = 2048, 128
"""Prompt tokens per forward pass: on a CPU larger chunks are no faster, and much larger ones are slower."""
DTYPES = ("auto", "keep", "float32", "bfloat16", "float16")
"""The types for floating-point weights."""
HAND_OVER = ("auto", "sound", "refused", "off")
"""The extents of the hand-over to Ollama's own runner."""
DRAFT_AUTO, DRAFT_OFF = "auto", "off"
"""The values of `--draft` that name no model."""
CACHE_PERCENT = 25
"""The default share of memory for the prefix cache, which weights leave free."""
MEMORY_PERCENT = 75
"""The default share of the device's memory for everything together."""
MOST_PARALLEL = MOST_RANKS = 64
"""The most processes that share a model."""
DEFAULT_PARALLEL = 4
"""The default number of requests that run at once."""

Start = Literal["descriptor", "symlink"]
"""The ways to start Ollama so that it finds the shim afterwards (runner/ollama/launcher.py)."""


class OllamaRunner(msgspec.Struct, frozen=True, kw_only=True):
    """Ollama's own runner, in whose place `mlx-runner ollama serve` lets the host start this one."""

    command: tuple[str, ...]
    """Ollama's executable and the arguments that the host gave its runner."""
    environ: Mapping[str, str]
    """The environment that the host gave its runner."""
    libraries: Path | None = None
    """Ollama's `lib/ollama`, with its MLX libraries; None if it has none."""
    media: frozenset[str] = frozenset()
    """The packages of Ollama's sources for whose models it takes pictures or sound."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a server. Names hold the units."""

    model: str
    port: int
    models_dir: Path
    context_tokens: int | None = None
    """The most tokens of a context; None: as many as the model allows."""
    verify: bool = False
    dtype: str = "auto"
    """One of DTYPES."""
    memory: Bound = Bound(percent=MEMORY_PERCENT)
    """The limit for everything together: weights, caches, and the memory that computing needs. A share is one of the
    device's memory or, on a CPU, of the memory available at the start."""
    cache: str
    cache_memory: Bound = Bound()
    """The limit for the prefix cache, live and paged out. A share is one of the device's memory."""
    disk_cache: Path | None = None
    """The directory in which the trie is kept between processes; None: not at all."""
    disk_memory: Bound = Bound(16 << 30, 25)
    """The limit for everything in it, of all models. A share is one of the volume's free bytes."""
    kv_bits: int | None = None
    """The bits of keys and values; None: not quantized."""
    ranks: int = 1
    """The processes that compute the model together."""
    ranks_here: int = 1
    """Those of them that share this machine."""
    followers: tuple[str, ...] = ()
    """HOST:PORT of the services on other machines that start the others; none: this process starts them."""
    secret_file: Path | None = None
    """The file with the secret that these services know too."""
    parallel: int = DEFAULT_PARALLEL
    """The number of requests that run at once; always 1 with a cache for one conversation or none."""
    max_gap_s: float = DEFAULT_MAX_GAP_MS / 1000
    """The longest pause between two tokens of a running answer while prompts are read."""
    draft: str = DRAFT_AUTO
    """Whether tokens are drafted, i.e. tried several at a time: DRAFT_OFF; DRAFT_AUTO, where known text suggests them
    and by the draft that lies beside the model; or the name or path of a model that drafts where no text does."""
    draft_tokens: int | None = None
    """The most drafts of one step; None: as suits the device."""
    draft_known: bool = False
    """True if greedy answers begin with what the cache knows of them."""
    prefill_chunk_tokens: int | None = None
    """Prompt tokens per forward pass while no answer is generated; None: as suits the device."""
    blas: str
    blas_threads: int | None
    trace: Path | None = None
    """The file for a trace of the engine's time."""
    record: Path | None = None
    """The file for a recording of all requests and of what they are computed by; None: nothing is recorded."""
    no_media: bool = False
    """True if the tower of a model that sees is left out."""
    inspect_text: bool = False
    """True if `/v1/cache` and the page show the beginnings of prompts."""
    log_level: int
    watch_parent: bool
    hosted: bool = False
    """True if a host started the process, False if a person did."""
    hand_over: str = HAND_OVER[0]
    """One of HAND_OVER."""
    ollama: OllamaRunner | None = None
    """The runner to hand over to; None without `mlx-runner ollama serve`."""
    warnings: tuple[str, ...] = ()
    """Environment variables that are ignored, and why; for the log."""


def context_limit(own_tokens: int, wanted_tokens: int | None) -> int:
    """Returns the most tokens of a context: never more than `own_tokens`, the model's own limit (0: not stated)."""
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
    """The settings of `mlx-runner top`."""

    url: str
    """The runner's address: `http://host:port`."""
    once: bool = False
    log_level: int


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner replay`."""

    file: Path
    model: str | None = None
    """The name or path of the model; None: as it was recorded."""
    models_dir: Path
    log_level: int


class FollowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner follow`."""

    address: str
    """The IPv4 address on which leaders reach this machine."""
    port: int
    secret_file: Path
    models_dir: Path
    log_level: int


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `mlx-runner check`."""

    model: str
    models_dir: Path
    context_tokens: int | None = None
    verify: bool = False
    draft: str = DRAFT_AUTO
    """As in `Settings`; with DRAFT_OFF, what DRAFT_AUTO would do is told all the same."""
    dtype: str = "auto"
    memory: Bound = Bound(percent=MEMORY_PERCENT)
    blas: str = "auto"
    blas_threads: int | None = None
    disk_cache: Path | None = None
    json: bool = False
    log_level: int
