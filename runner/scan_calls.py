"""Calls of scans: the functions in `runner/model/scans` are scans, and `runner/cache/layers/scans.py` watches them.

A scan computes the states of a recurrent layer from the state before the first token and from rows, one for each token.
So the same call with fewer rows gives the state after fewer tokens, and calls over the rows in pieces, each from the
state after the piece before it, give the same outputs. Owner: the engine thread.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple, TypeVar, cast

_Results = tuple[object, object]
_Scan = TypeVar("_Scan", bound=Callable[..., tuple[object, object]])


class ScanCall(NamedTuple):
    """A call of a scan."""

    function: Callable[..., _Results]
    """Returns its outputs, and the state after the last token."""
    before: str
    """The parameter with the state before the first token. Its first axis, as that of all rows, is that of texts."""
    rows: Sequence[str]
    """The parameters with rows; each may be None."""
    axis: int
    """The axis of tokens, in rows and in outputs."""
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def bound(self) -> inspect.BoundArguments:
        """Returns the arguments by the names of their parameters."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs)


watchers: list[Callable[[ScanCall], _Results]] = []
"""The last of them computes every call of a scan in its place."""


def announced(before: str, rows: str, axis: int = 1) -> Callable[[_Scan], _Scan]:
    """Makes a function a scan, whose calls go to the last of the `watchers`. `rows` are names separated by spaces. For
    the other parameters see `ScanCall`."""

    def decorate(function: _Scan) -> _Scan:
        @wraps(function)
        def call(*args: object, **kwargs: object) -> _Results:
            if not watchers:
                return function(*args, **kwargs)
            return watchers[-1](ScanCall(function, before, rows.split(), axis, args, kwargs))

        return cast("_Scan", call)

    return decorate
