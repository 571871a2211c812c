"""The exceptions of the runner.

RunnerError
├── UsageError        a flag or an environment variable is wrong: exit status 2
├── ModelError        the model cannot be opened: `Error: <text>` on stderr, exit status 1
│   └── FaultsError, MissingError, UnknownError, ReadError, ComputeError
├── DraftError        `--draft` names a model that cannot draft for the served one: exit status 1
├── PanicError        a library written in Rust has panicked: status 500 or an `Error` line, for one request
├── RankError         the ranks cannot begin, or cannot continue together: exit status 1
└── RequestError      one request is refused: `status` and text before the stream, an `Error` line within it
    └── MediaError    a picture or sound of the request cannot be used: status 400
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from runner.versions import remedy


class RunnerError(Exception):
    """A refusal by the runner itself. The text is written for the user."""

    advice = ""
    """Advice for the log; empty if the error's text gives the advice."""


class UsageError(RunnerError):
    """A flag or an environment variable has a value that cannot be used."""


class ModelError(RunnerError):
    """The model cannot be opened. The text names the file or tensor, the value expected and the value found."""

    advice = "`mlx-runner check NAME` reports every problem with a model, without loading it"

    def __init__(self, text: str, advice: str | None = None) -> None:
        """`advice` replaces the class's, in the log and in `check`. Give an empty one if `text` contains the advice."""
        super().__init__(text)
        if advice is not None:
            self.advice = advice


class FaultsError(ModelError):
    """Several faults of one model. The text is that of the first fault."""

    def __init__(self, faults: Sequence[ModelError]) -> None:
        super().__init__(str(faults[0]))
        self.faults = tuple(faults)


class MissingError(ModelError):
    """The store has no model of this name. `text` is worded as hosts know it, `explained` for a person."""

    def __init__(self, text: str, explained: str) -> None:
        super().__init__(text)
        self.explained = explained


class UnknownError(ModelError):
    """A part of the model is of a kind that this runner does not know, but another runner may."""


class ReadError(ModelError):
    """The weights cannot be read, although all headers are in order."""


class ComputeError(ModelError):
    """The model fails in a computation that every request needs."""

    advice = (
        "weights and config.json match each other, so compare the values in config.json with those of the model's"
        " publisher; if a type is not supported, try --dtype float32"
    )


class DraftError(RunnerError):
    """The model that `--draft` names cannot draft for the served model."""


class RankError(RunnerError):
    """The ranks cannot begin, or one of them has ended or disagrees with the leader."""


class PanicError(RunnerError):
    """A library written in Rust has panicked while it processed a text or a file that it had accepted."""


_PANIC = "PanicException"  # pyo3's class, in a module that cannot be imported


@contextmanager
def panics_as(error: Callable[[str], Exception]) -> Iterator[None]:
    """Raises `error(reason)` in place of a panic of Rust code inside the block. Also a decorator. A panic itself is not
    an `Exception`, so code that handles the errors of one request would not catch it."""
    try:
        yield
    except Exception:
        raise
    except BaseException as panic:
        if type(panic).__name__ != _PANIC:
            raise
        raise error(str(panic)) from None


NO_NUMBERS = (
    "the model computes NaN or infinity in place of numbers: its weights are damaged, or its values exceed their type."
    " `mlx-runner check --verify NAME` looks for damage; if there is none, serve the model with --dtype float32"
)
"""The text of the error for a request whose answer, score or embedding would come from NaN or infinity."""


def no_mlx(error: ImportError) -> RunnerError:
    """Returns the error for a process that cannot import MLX."""
    reason = "it was installed without a backend" if str(error).startswith("libmlx.so: cannot open") else error
    return RunnerError(f"MLX not available: {reason}; {remedy()}")


class RequestError(RunnerError):
    """One request cannot be served."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class MediaError(RequestError):
    """A picture or a sound cannot be used: it is damaged, too large, or of a format or a shape that is not served."""
