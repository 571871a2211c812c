"""Types for the options of benchmarks, which raise `ArgumentTypeError`, and exit statuses of `scripts/bench`."""

from argparse import ArgumentTypeError

from runner.cli.convert import blas_threads
from runner.errors import UsageError


def threads(text: str) -> int | None:
    """Parses a number of BLAS threads, or "auto", as the runner's own flag."""
    try:
        return blas_threads({"blas-threads": text})
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error


MEASURED = MET, MISSED = 0, 1
"""There is a report: all targets are met, or some are missed."""
USAGE, BUSY = 2, 3
"""No report: wrong options; other programs use the machine."""
