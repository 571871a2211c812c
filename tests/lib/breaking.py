"""A call that goes wrong: the one way in which tests break what they want broken."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def breaking(
    where: object, name: str, at: int | None = None, error: Callable[[str], BaseException] = MemoryError
) -> Iterator[list[int]]:
    """Lets the call number `at`, from 0, of a function or a method raise `error`, or every call. The list has a number
    for each call."""
    original: Callable[..., object] = getattr(where, name)
    calls: list[int] = []

    def broken(*args: object, **named: object) -> object:
        calls.append(len(calls))
        if at in (None, calls[-1]):
            raise error(f"in {name}, broken on purpose")
        return original(*args, **named)

    with patch.object(where, name, broken):
        yield calls
