"""What recurrent layers read in a round, so that they can stand behind any of its tokens without another forward.

A recurrent layer keeps two kinds of states. The state of its *scan* follows from the state before it and the rows that
the scan reads, so a scan over the first of these rows gives the state behind them: one small operation a layer. The
state of a *convolution* is the last rows of its input, so it is a slice of the old state joined to the new rows.

The models hand out neither. So while the forward of a round is built, two functions that they call are replaced: the
scan that their module imported, and `mx.concatenate`, which joins the rows. A state is known only if the very arrays
that were in the layer before the round, and that are in it afterwards, went through them; a layer with any other state
goes back to where the round began. Nothing is replaced outside of rounds.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx

States = list[mx.array | None]
ScanFunction = Callable[..., tuple[mx.array, mx.array]]

SCANS = {
    "gated_delta_update": (
        ("q", "k", "v", "a", "b", "mask"),
        ("bailing_moe_v3", "kimi_k3", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_next"),
    ),
    "ssm_update": (
        ("hidden_states", "B", "C", "dt", "mask"),
        ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "plamo2"),
    ),
}
"""Scan of mlx-lm -> its parameters that have a row for each token, on axis 1, and the modules that call it. It returns
its output and the state behind the last row; its parameter `state` is the one before the first."""

ROW_COPIES = 4
"""What is kept of a token until the round is accepted takes about so many times the bytes of its row in the states of
the convolutions: the row itself, what comes out of the convolutions, and the projection that row and gates are parts
of."""


class _Scan(NamedTuple):
    """A call of a scan."""

    function: ScanFunction
    rows: tuple[str, ...]
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def arguments(self) -> dict[str, object]:
        """Returns the arguments by name."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

    def behind(self, count: int) -> mx.array:
        """Returns the state behind the first `count` rows (lazy)."""
        cut = {
            name: value[:, :count] if name in self.rows and isinstance(value, mx.array) else value
            for name, value in self.arguments().items()
        }
        return self.function(**cut)[1]


class _Caught:
    """What went through the replaced functions in one forward. It holds every array whose id it knows."""

    def __init__(self, states: Sequence[mx.array]) -> None:
        """`states` are those of all layers before the round."""
        self._states = {id(state): state for state in states}
        self._joined: dict[int, list[mx.array]] = {}  # by the state that stands first
        self._scans: dict[int, tuple[mx.array, _Scan]] = {}  # by the state that came out

    def scan(self, function: ScanFunction, rows: tuple[str, ...]) -> ScanFunction:
        """Returns the scan that stands for `function`."""

        def caught(*args: object, **kwargs: object) -> tuple[mx.array, mx.array]:
            output, state = function(*args, **kwargs)
            self._scans[id(state)] = state, _Scan(function, rows, args, kwargs)
            return output, state

        return caught

    def concatenate(self, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Returns the function that stands for `mx.concatenate`."""

        def caught(arrays: Sequence[mx.array], *args: object, **kwargs: object) -> mx.array:
            joined = function(arrays, *args, **kwargs)
            if len(arrays) == 2 and id(arrays[0]) in self._states:
                self._joined.setdefault(id(arrays[0]), []).append(joined)
            return joined

        return caught

    def way(self, before: mx.array | None, after: mx.array | None, count: int) -> Callable[[int], mx.array] | None:
        """Returns a function from a number of tokens to the state behind them, given the states around a round over
        `count` tokens; None if it is not known how the one came from the other."""
        if before is None or after is None:
            return None
        if id(after) in self._scans:
            scan = self._scans[id(after)][1]
            arguments = scan.arguments()
            return scan.behind if arguments.get("state") is before and arguments.get("lengths") is None else None
        joined = self._joined.get(id(before), ())
        if len(joined) != 1 or before.ndim != 3 or after.shape != before.shape:
            return None
        rows, kept = joined[0], before.shape[1]
        if rows.shape != (before.shape[0], kept + count, before.shape[2]):
            return None
        return lambda tokens: mx.contiguous(rows[:, tokens : tokens + kept])


class RoundReads:
    """What one layer reads in a round. Owner: the engine thread."""

    def __init__(self, states: Callable[[], States], count: int) -> None:
        """`states` returns the present states of the layer, which is about to read `count` tokens."""
        self.states = states
        self.before = [*states()]
        self._count = count
        self._after: States = []
        self._caught: _Caught | None = None
        self._ways: list[Callable[[int], mx.array]] | None = None

    def end(self, caught: _Caught) -> None:
        """Takes what was caught in the forward, which has been built."""
        self._caught, self._after = caught, [*self.states()]

    @property
    def known(self) -> bool:
        """True if the states behind every token of the round can be computed."""
        return bool(self._known())

    def behind(self, count: int) -> States:
        """Returns the states behind the first `count` tokens, at least 1 (lazy). Raises ValueError unless `known`."""
        ways = self._known()
        if not ways:
            raise ValueError("the states within a round are not known")
        return [way(count) for way in ways]

    def _known(self) -> list[Callable[[int], mx.array]]:
        if self._ways is None:
            found = [] if self._caught is None else self._found(self._caught)
            self._ways = [way for way in found if way is not None] if None not in found else []
        return self._ways

    def _found(self, caught: _Caught) -> list[Callable[[int], mx.array] | None]:
        pairs = zip(self.before, self._after, strict=True)
        return [caught.way(before, after, self._count) for before, after in pairs]


@contextmanager
def watched(reads: Sequence[RoundReads]) -> Iterator[None]:
    """Surrounds the call of the model in a round, and catches what these layers read."""
    if not reads:
        yield
        return
    caught = _Caught([state for each in reads for state in each.before if state is not None])
    replaced: list[tuple[object, str, object]] = [(mx, "concatenate", mx.concatenate)]
    setattr(mx, "concatenate", caught.concatenate(mx.concatenate))  # noqa: B010  its type is fixed
    for name, (rows, modules) in SCANS.items():
        for module in (sys.modules.get(f"mlx_lm.models.{module}") for module in modules):
            if module is not None:
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, caught.scan(getattr(module, name), rows))
    try:
        yield
    finally:
        for owner, name, function in replaced:
            setattr(owner, name, function)
    for each in reads:
        each.end(caught)
