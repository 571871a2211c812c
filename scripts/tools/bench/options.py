"""Types for the options of benchmarks, which raise `ArgumentTypeError`, and exit statuses of `scripts/bench`."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence

from runner.cli.convert import blas_threads
from runner.errors import UsageError
from runner.sizes import parse_bound


def numbers(text: str) -> list[int]:
    """Parses "1,2,8"."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no list of whole numbers") from error


def threads(text: str) -> int | None:
    """Parses a number of BLAS threads, or "auto", as the runner's own flag."""
    try:
        return blas_threads({"blas-threads": text})
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a parser of "a,b" that accepts the known names only."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def size_bytes(text: str, whole: int) -> int:
    """Parses "256MiB", "4G", or "10%" of the `whole`."""
    try:
        return parse_bound(text).bytes_of(whole)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


MEASURED = MET, MISSED = 0, 1
"""There is a report: all targets are met, or some are missed."""
USAGE, BUSY = 2, 3
"""No report: wrong options; other programs use the machine."""
