"""The exceptions of the runner.

RunnerError
├── UsageError        the command line or an environment variable is wrong: exit status 2
├── ModelError        the model cannot be opened: `Error: <text>` on stderr, exit status 1
│   ├── FaultsError   for several reasons at once
│   ├── ReadError     its weights cannot be read, though all headers are in order
│   └── ComputeError  it is loaded, and its first forward fails
└── RequestError      one request is refused: `status` and text before the stream, an `Error` line after it began
"""

from collections.abc import Sequence


class RunnerError(Exception):
    """Anything the runner itself says no to. Its text is written for the person who reads it."""

    advice = ""
    """What to do next, where the text does not say it: for the log."""


class UsageError(RunnerError):
    """A flag or an environment variable has a value that cannot be used."""


class ModelError(RunnerError):
    """The model cannot be opened; the text names the file or tensor, what was wanted and what was found."""

    advice = "`mlx-runner check NAME` tells everything that is wrong with a model, without loading it"


class FaultsError(ModelError):
    """Several faults at once; its text is that of the first."""

    def __init__(self, faults: Sequence[ModelError]) -> None:
        super().__init__(str(faults[0]))
        self.faults = tuple(faults)


class ReadError(ModelError):
    """The weights cannot be read, though all headers are in order."""


class ComputeError(ModelError):
    """The model fails at what every request would ask of it."""

    advice = (
        "weights and config.json fit each other, so compare the values in config.json with those of the model's"
        " publisher; where a type is not supported, try --dtype float32"
    )


def no_mlx(error: ImportError) -> RunnerError:
    """What to say where MLX cannot be imported."""
    return RunnerError(
        f"MLX not available: {error}; install requirements/cpu.lock or, for NVIDIA, requirements/cuda.lock"
    )


class RequestError(RunnerError):
    """One request cannot be served."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status
