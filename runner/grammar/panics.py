"""Turns panics of Rust code into request errors. A panic is no `Exception`: uncaught, it would end the engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from runner.errors import RequestError

_PANIC = "PanicException"  # its module cannot be imported


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises RequestError in place of a panic inside the block."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        reason = str(error)
    else:
        return
    raise RequestError(f"Format: llguidance failed: {reason}; write the format differently")
