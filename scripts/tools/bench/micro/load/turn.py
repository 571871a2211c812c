"""One measurement of `scripts/bench load`, in a process of its own, so that no allocator remembers an earlier one.

`python -m scripts.tools.bench.micro.load.turn` reads a Task as JSON from standard input and prints a Turn as JSON.
All imports are done before the clock starts.
"""

import gc
import json
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx

PLAIN = "mx.load"
RUNNER = "runner"
MLX_LM = "mlx-lm"


class Task(NamedTuple):
    """A loader and the files that it is to load."""

    loader: str
    model: str
    models_dir: str
    files: Sequence[str]


class Turn(NamedTuple):
    """The cost. `seconds` include `open_seconds`, the runner's look at the headers; None for the others.

    `peak_bytes` is MLX's peak over what it held before, `resident_bytes` the same of the whole process.
    """

    seconds: float
    open_seconds: float | None
    peak_bytes: int
    resident_bytes: int


class _Loaded(NamedTuple):
    """Keeps the weights until memory was measured."""

    weights: object
    open_seconds: float | None = None


def _plain(task: Task) -> Callable[[], _Loaded]:
    """`mx.load` of every file, and evaluation of all that is in it."""

    def load() -> _Loaded:
        weights = []
        for file in task.files:
            arrays = mx.load(file, format="safetensors")
            mx.eval(arrays)
            weights.append(arrays)
        return _Loaded(weights)

    return load


def _runner(task: Task) -> Callable[[], _Loaded]:
    from mlx_lm.models import llama, qwen3_moe  # noqa: F401  # the runner imports the one that it needs

    from runner.model import open_model
    from runner.model.weights.load import load as load_opened

    def load() -> _Loaded:
        started = perf_counter()
        opened = open_model(task.model, Path(task.models_dir))
        open_seconds = perf_counter() - started
        return _Loaded(load_opened(opened), open_seconds)

    return load


def _mlx_lm(task: Task) -> Callable[[], _Loaded]:
    from mlx_lm.utils import load_model

    return lambda: _Loaded(load_model(Path(task.model)))


LOADERS: dict[str, Callable[[Task], Callable[[], _Loaded]]] = {PLAIN: _plain, RUNNER: _runner, MLX_LM: _mlx_lm}
"""By name: each imports what it needs, and returns what is to be measured."""


def measure(task: Task) -> Turn:
    """Load once. Raises what the loader raises."""
    load = LOADERS[task.loader](task)
    gc.collect()  # what is freed while it loads would hide as much of what it takes
    mx.reset_peak_memory()
    active, resident = mx.get_active_memory(), _resident_peak_bytes()
    started = perf_counter()
    loaded = load()
    seconds = perf_counter() - started
    peak_bytes = mx.get_peak_memory() - active
    return Turn(seconds, loaded.open_seconds, peak_bytes, _resident_peak_bytes() - resident)


def _resident_peak_bytes() -> int:
    """The most memory that this process ever had resident."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux hands a child the figure of its parent in getrusage
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.load(sys.stdin)))._asdict()))
