"""The reads of recurrent layers in a forward: they show the states after tokens inside the forward.

A recurrent layer has two kinds of states. The state of a *scan* is computed from the state before the scan and the rows
that the scan reads. So a scan over the first n rows gives the state after n tokens. The state of a *convolution* is the
last rows of the array that it reads, so the state after n tokens is another slice of this array.

A round needs the states after some token, known only after the forward: it repeats the scan over the first tokens, one
small operation a layer. A prompt has checkpoints, known before the forward: its scans are computed in pieces, from one
checkpoint to the next, so nothing is computed twice.

Models return neither rows nor such states. So while a forward is built, the calls of scans are watched
(`runner/scan_calls.py`), and the functions that cut the last rows from an array are replaced. The states are known only
if these calls show how the arrays in the layer after the forward came about. In a round, a layer with any other state
goes back to where the round began; a prompt stops at checkpoints.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import cast

import mlx.core as mx

from runner.scan_calls import ScanCall, watchers

States = list[mx.array | None]
StateAfter = Callable[[int, mx.array | None], mx.array]
"""Maps a number of tokens, and indices of texts or None for all texts, to the states after so many tokens (lazy)."""


class StateRecorder:
    """Records the calls in one forward."""

    def __init__(self, count: int, stops: Sequence[int]) -> None:
        """The forward is over `count` tokens. `stops` are the numbers of tokens after which states are needed."""
        self._count = count
        self._stops = stops
        self._made: dict[int, tuple[mx.array, object, StateAfter]] = {}
        """The id of a state -> the state, which is held so that no other array gets this id; the state that it was
        computed from, or Ellipsis if it needs none; and a function that computes such states."""

    def scan(self, call: ScanCall) -> tuple[object, object]:
        """Computes the call of a scan, in pieces that end at the stops."""
        bound = call.bound().arguments
        rows = [row for name in call.rows if isinstance(row := bound.get(name), mx.array)]
        before, states = bound.get(call.before), dict[int, mx.array]()
        if self._stops and all(row.shape[call.axis] == self._count for row in rows):
            outputs, begin, after = list[mx.array](), 0, before
            for end in (*self._stops, self._count):
                output, after = _piece(call, begin, end, after)
                outputs.append(cast("mx.array", output))
                begin, states[end] = end, cast("mx.array", after)
            output = mx.concatenate(outputs, axis=call.axis)
        else:
            output, after = call.function(*call.args, **call.kwargs)
        if states or not self._stops:
            self._made[id(after)] = cast("mx.array", after), before, partial(_scanned, call, states)
        return output, after

    def index(self, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Returns a function that calls `function`, which is `mx.array.__getitem__`, and records the last rows."""

        def recorded(array: mx.array, index: object) -> mx.array:
            part = function(array, index)
            if (axis := _end_axis(array, part, index)) is not None:
                earlier, kept = array.shape[axis] - self._count, part.shape[axis]
                # Without earlier rows, as for a shift by one token, the first tokens have too few.
                if earlier == kept or (earlier == 0 and kept <= min(self._stops, default=1)):
                    self._made[id(part)] = part, ..., partial(_last_rows, array, axis, earlier, kept)
            return part

        return recorded

    def contiguous(self, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Returns a function that calls `function`, which is `mx.contiguous`, and records copies of the last rows."""

        def recorded(array: mx.array, *args: bool, **kwargs: object) -> mx.array:
            copy = function(array, *args, **kwargs)
            if id(array) in self._made:
                self._made[id(copy)] = copy, *self._made[id(array)][1:]
            return copy

        return recorded

    def keep(self, states: Sequence[mx.array | None]) -> None:
        """Forgets all arrays but these states."""
        self._made = {id(state): self._made[id(state)] for state in states if id(state) in self._made}

    def state_after(self, before: mx.array | None, after: mx.array | None) -> StateAfter | None:
        """Returns a function that computes states within the forward. `before` and `after` are the states around it.
        Returns None if the recorded calls do not show how `after` came about."""
        _, start, found = self._made.get(id(after), (None, None, None))
        return found if start is before or start is ... else None


def _scanned(call: ScanCall, states: dict[int, mx.array], tokens: int, of: mx.array | None) -> mx.array:
    """Returns the state after some tokens of a scan, which passed `states`."""
    if tokens in states:
        return states[tokens]
    before = call.bound().arguments.get(call.before)
    start = before[of] if of is not None and isinstance(before, mx.array) else before
    return cast("mx.array", _piece(call, 0, tokens, start, of)[1])


def _last_rows(rows: mx.array, axis: int, earlier: int, kept: int, tokens: int, of: mx.array | None) -> mx.array:
    """Returns the last of the rows up to `tokens`; `earlier` rows are of tokens before the forward."""
    end = earlier + tokens
    part = (rows if of is None else rows[of])[(slice(None),) * axis + (slice(end - kept, end),)]
    # A slice, and even a copy of it, could keep all rows alive. (Our kernels join only the rows of a small slice.)
    return mx.take(part, mx.arange(kept), axis)


def _end_axis(array: mx.array, part: mx.array, index: object) -> int | None:
    """Returns the axis along which `part`, which is `array[index]`, has the last entries; or None."""
    for each in index if isinstance(index, tuple) else (index,):
        if each is not ... and not (isinstance(each, slice) and each.stop is None and each.step is None):
            return None
    axes = [axis for axis in range(array.ndim) if array.shape[axis] != part.shape[axis]]
    return axes[0] if len(axes) == 1 else None


def _piece(call: ScanCall, begin: int, end: int, state: object, of: mx.array | None = None) -> tuple[object, object]:
    """Computes a call over the tokens [begin, end) of all texts, or of the texts `of`, from `state`."""
    bound = call.bound()
    bound.arguments[call.before] = state
    for name in call.rows:
        if isinstance(row := bound.arguments.get(name), mx.array):
            bound.arguments[name] = mx.split(row if of is None else row[of], [begin, end], call.axis)[1]
    return call.function(*bound.args, **bound.kwargs)


class StateReads:
    """The reads of one layer in a forward. Owner: the engine thread."""

    def __init__(self, states: Callable[[], States], count: int, stops: Sequence[int] = ()) -> None:
        """`states` returns the present states of the layer. The forward is over the next `count` tokens. `stops` are
        the numbers of tokens, in ascending order, after which states are needed; without them, any number is."""
        self.states = states
        self.before = [*states()]
        self.count = count
        self.stops = stops
        self._after: States = []
        self._recorder: StateRecorder | None = None

    def end(self, recorder: StateRecorder) -> None:
        """Stores the record of the forward and the states after it. Call it when the graph of the forward is built."""
        self._recorder = recorder
        self._after = [*self.states()]

    @property
    def known(self) -> bool:
        """True if the states after the needed numbers of tokens can be computed."""
        return bool(self._functions)

    def states_after(self, counts: Sequence[int]) -> States:
        """Returns the states after the first tokens of the forward (lazy). `counts` has the number of tokens for each
        text. Raises ValueError unless the states are `known` or all counts are 0."""
        if not any(counts):
            return self.before
        if not self._functions:
            raise ValueError("the states within a forward are not known")
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
        found = [self._recorder.state_after(before, after) for before, after in pairs]
        return [each for each in found if each is not None] if None not in found else []


@contextmanager
def watched(reads: Sequence[StateReads]) -> Iterator[None]:
    """Surrounds the call of the model in a forward, and records the reads of the layers in `reads`."""
    if not reads:
        yield
        return
    recorder = StateRecorder(reads[0].count, reads[0].stops)
    with ExitStack() as stack:
        for owner, name, replaced in (mx.array, "__getitem__", recorder.index), (mx, "contiguous", recorder.contiguous):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replaced(getattr(owner, name)))
        stack.callback(watchers.remove, recorder.scan)
        watchers.append(recorder.scan)
        yield
    for each in reads:
        each.end(recorder)
    recorder.keep([state for each in reads for state in each.states()])
