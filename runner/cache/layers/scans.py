"""The reads of recurrent layers in a round: they let a layer stand after any token of it without another forward.

A recurrent layer has two kinds of states. The state of a *scan* is computed from the state before the scan and the rows
that the scan reads. So a scan over the first n rows gives the state after n tokens: one small operation a layer. The
state of a *convolution* is the last rows of its input, so it is a slice of the old state joined to the new rows.

Models do not return these rows. So while the forward of a round is built, the calls of scans are watched
(`runner/scan_calls.py`), and `mx.concatenate`, which joins the rows, is replaced. The states within a round are known
only if these calls show how the arrays in the layer after the round came from the arrays before it. A layer with any
other state goes back to where the round began.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import cast

import mlx.core as mx

from runner.scan_calls import ScanCall, watchers

States = list[mx.array | None]
StateAfter = Callable[[int, mx.array | None], mx.array]
"""Maps a number of tokens, and indices of texts or None for all texts, to the states after so many tokens (lazy)."""


class StateRecorder:
    """Records the calls in one forward. Holds every array whose id it has recorded, so that no other array gets this
    id."""

    def __init__(self, states: Sequence[mx.array]) -> None:
        """`states` are the states of all layers before the round."""
        self._states = {id(state): state for state in states}
        self._joined: dict[int, list[tuple[mx.array, int]]] = {}
        """The id of a state -> what it was joined to, with the axis."""
        self._scans: dict[int, ScanCall] = {}
        """The id of the state that a scan returned -> the call."""

    def scan(self, call: ScanCall) -> None:
        """Records the call of a scan."""
        self._scans[id(call.after)] = call

    def concatenate(self, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Returns a function that calls `function`, which is `mx.concatenate`, and records its results."""

        def recorded(arrays: Sequence[mx.array], axis: int | None = 0, **kwargs: object) -> mx.array:
            joined = function(arrays, axis, **kwargs)
            if len(arrays) == 2 and id(arrays[0]) in self._states and axis:
                self._joined.setdefault(id(arrays[0]), []).append((joined, axis % joined.ndim))
            return joined

        return recorded

    def state_after(self, before: mx.array | None, after: mx.array | None, count: int) -> StateAfter | None:
        """Returns a function that computes states within a round over `count` tokens. `before` and `after` are the
        states around the round. Returns None if the recorded calls do not show how `after` came from `before`."""
        if before is None or after is None:
            return None
        if id(after) in self._scans:
            call = self._scans[id(after)]
            return partial(_state_after, call) if call.bound().arguments.get(call.before) is before else None
        joined = self._joined.get(id(before), ())
        if len(joined) != 1 or after.shape != before.shape:
            return None
        rows, axis = joined[0]
        kept = before.shape[axis]
        if rows.shape[axis] == kept + count - 1:  # the last row is for the token after the round
            rows = mx.concatenate([rows, mx.split(after, [kept - 1], axis)[1]], axis)
        if rows.shape != (*before.shape[:axis], kept + count, *before.shape[axis + 1 :]):
            return None

        def last_rows(tokens: int, of: mx.array | None) -> mx.array:
            return mx.contiguous(mx.split(rows if of is None else rows[of], [tokens, tokens + kept], axis)[1])

        return last_rows


def _state_after(call: ScanCall, tokens: int, of: mx.array | None) -> mx.array:
    """Returns the state after the first tokens of a call."""
    bound = call.bound()
    for name in (call.before, *call.rows):
        if isinstance(value := bound.arguments.get(name), mx.array):
            value = value if of is None else value[of]
            bound.arguments[name] = mx.split(value, [tokens], call.rows[name])[0] if name in call.rows else value
    return cast("mx.array", call.function(*bound.args, **bound.kwargs)[1])


class RoundReads:
    """The reads of one layer in a round. Owner: the engine thread."""

    def __init__(self, states: Callable[[], States], count: int) -> None:
        """`states` returns the present states of the layer. The round is over the next `count` tokens."""
        self.states = states
        self.before = [*states()]
        self._count = count
        self._after: States = []
        self._recorder: StateRecorder | None = None

    def end(self, recorder: StateRecorder) -> None:
        """Stores the record of the forward and the states after it. Call it when the graph of the forward is built."""
        self._recorder = recorder
        self._after = [*self.states()]

    @property
    def known(self) -> bool:
        """True if the states after every token of the round can be computed."""
        return bool(self._functions)

    def states_after(self, counts: Sequence[int]) -> States:
        """Returns the states after the first tokens of the round (lazy). `counts` has the number of tokens for each
        text. Raises ValueError unless the states are `known` or all counts are 0."""
        if not any(counts):
            return self.before
        if not self._functions:
            raise ValueError("the states within a round are not known")
        texts: dict[int, list[int]] = {}
        for text, count in enumerate(counts):
            texts.setdefault(count, []).append(text)
        if len(texts) == 1:
            return [state_after(counts[0], None) for state_after in self._functions]
        places = [text for same in texts.values() for text in same]
        order = mx.array([places.index(text) for text in range(len(places))])
        groups = [(count, mx.array(same)) for count, same in texts.items()]
        return [
            mx.concatenate([state_after(count, of) if count else before[of] for count, of in groups])[order]
            for before, state_after in zip(self.before, self._functions, strict=True)
            if before is not None
        ]

    @cached_property
    def _functions(self) -> list[StateAfter]:
        """The functions that compute the states; an empty list if one of the states is not known."""
        if self._recorder is None:
            return []
        pairs = zip(self.before, self._after, strict=True)
        found = [self._recorder.state_after(before, after, self._count) for before, after in pairs]
        return [each for each in found if each is not None] if None not in found else []


@contextmanager
def watched(reads: Sequence[RoundReads]) -> Iterator[None]:
    """Surrounds the call of the model in a round, and records the reads of the layers in `reads`."""
    if not reads:
        yield
        return
    recorder = StateRecorder([state for each in reads for state in each.before if state is not None])
    concatenate = mx.concatenate
    setattr(mx, "concatenate", recorder.concatenate(concatenate))  # noqa: B010  its type is fixed
    watchers.append(recorder.scan)
    try:
        yield
    finally:
        watchers.remove(recorder.scan)
        setattr(mx, "concatenate", concatenate)  # noqa: B010
    for each in reads:
        each.end(recorder)
