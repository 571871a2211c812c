"""Types for the options of benchmarks: each takes a word of the command line, or raises `ArgumentTypeError`."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence

from runner.sizes import parse_bound


def numbers(text: str) -> list[int]:
    """Parses "1,2,8"."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no list of whole numbers") from error


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a parser of "a,b" that accepts the known names only."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def size_bytes(text: str, whole: int | None = None) -> int:
    """Parses "256MiB" or "4G", and "10%" where there is a `whole`."""
    try:
        bound = parse_bound(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    if whole is not None:
        return bound.bytes_of(whole)
    if bound.bytes is None:
        raise ArgumentTypeError(f"{text!r} is a share, not an amount of memory")
    return bound.bytes
