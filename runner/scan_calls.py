"""Calls of scans: the functions in `runner/model/scans` are scans, and `runner/cache/layers/scans.py` watches them.

A scan computes the states of a recurrent layer from the state before the first token and from rows, one for each token.
So the same call with fewer rows gives the state after fewer tokens. Owner: the engine thread.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import NamedTuple, TypeVar, cast

_Scan = TypeVar("_Scan", bound=Callable[..., tuple[object, object]])


class ScanCall(NamedTuple):
    """A call of a scan, and the state that it returned."""

    function: Callable[..., tuple[object, object]]
    before: str
    """The parameter with the state before the first token. Its first axis, as that of all rows, is that of texts."""
    rows: Mapping[str, int]
    """Parameter with rows -> the axis of tokens."""
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    after: object

    def bound(self) -> inspect.BoundArguments:
        """Returns the arguments by the names of their parameters."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs)


watchers: list[Callable[[ScanCall], None]] = []
"""They get every call of a scan."""


def announced(before: str, **rows: int) -> Callable[[_Scan], _Scan]:
    """Makes a function a scan, whose calls the `watchers` get. It returns its outputs, and the state after the last
    token. For `before` and `rows` see `ScanCall`."""

    def decorate(function: _Scan) -> _Scan:
        @wraps(function)
        def call(*args: object, **kwargs: object) -> tuple[object, object]:
            output, after = function(*args, **kwargs)
            for watch in watchers:
                watch(ScanCall(function, before, rows, args, kwargs, after))
            return output, after

        return cast("_Scan", call)

    return decorate
