"""The reads of recurrent layers in a round: they let a layer stand after any token of it without another forward.

A recurrent layer has two kinds of states. The state of a *scan* is computed from the state before the scan and the rows
that the scan reads. So a scan over the first n rows gives the state after n tokens: one small operation a layer. The
state of a *convolution* is the last rows of its input, so it is a slice of the old state joined to the new rows.

Models do not return these rows. So while the forward of a round is built, two functions that models call are replaced:
the scan that the model's module imported, and `mx.concatenate`, which joins the rows. The states within a round are
known only if calls of these functions show how the arrays in the layer after the round came from the arrays before it.
A layer with any other state goes back to where the round began. Outside of rounds no function is replaced.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
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
"""By the name of a scan of mlx-lm: the parameters that have a row for each token, on axis 1, and the modules that call
this scan. A scan returns its output and the state after the last row; its parameter `state` is the state before the
first row."""


class _Scan(NamedTuple):
    """A call of a scan."""

    function: ScanFunction
    rows: tuple[str, ...]
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def arguments(self) -> dict[str, object]:
        """Returns the arguments by the names of their parameters."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

    def state_after(self, count: int, of: mx.array | None) -> mx.array:
        """Returns the state after the first `count` rows (lazy), for the texts with the indices `of`; None stands for
        all."""
        arguments = self.arguments()
        for name in ("state", *self.rows):
            if isinstance(value := arguments.get(name), mx.array):
                value = value if of is None else value[of]
                arguments[name] = value[:, :count] if name in self.rows else value
        return self.function(**arguments)[1]


StateAfter = Callable[[int, mx.array | None], mx.array]
"""Maps a number of tokens, and indices of texts or None for all texts, to the states after so many tokens (lazy)."""


class StateRecorder:
    """Records the calls of the replaced functions in one forward. Holds every array whose id it has recorded, so that
    no other array gets this id."""

    def __init__(self, states: Sequence[mx.array]) -> None:
        """`states` are the states of all layers before the round."""
        self._states = {id(state): state for state in states}
        self._joined: dict[int, list[mx.array]] = {}  # by the id of the state that is joined first
        self._scans: dict[int, tuple[mx.array, _Scan]] = {}  # by the id of the state that the scan returned

    def scan(self, function: ScanFunction, rows: tuple[str, ...]) -> ScanFunction:
        """Returns a scan that calls `function` and records the call."""

        def recorded(*args: object, **kwargs: object) -> tuple[mx.array, mx.array]:
            output, state = function(*args, **kwargs)
            self._scans[id(state)] = state, _Scan(function, rows, args, kwargs)
            return output, state

        return recorded

    def concatenate(self, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Returns a function that calls `function`, which is `mx.concatenate`, and records its results."""

        def recorded(arrays: Sequence[mx.array], *args: object, **kwargs: object) -> mx.array:
            joined = function(arrays, *args, **kwargs)
            if len(arrays) == 2 and id(arrays[0]) in self._states:
                self._joined.setdefault(id(arrays[0]), []).append(joined)
            return joined

        return recorded

    def state_after(self, before: mx.array | None, after: mx.array | None, count: int) -> "StateAfter | None":
        """Returns a function that computes states within a round over `count` tokens. `before` and `after` are the
        states around the round. Returns None if the recorded calls do not show how `after` came from `before`."""
        if before is None or after is None:
            return None
        if id(after) in self._scans:
            scan = self._scans[id(after)][1]
            arguments = scan.arguments()
            return scan.state_after if arguments.get("state") is before and arguments.get("lengths") is None else None
        joined = self._joined.get(id(before), ())
        if len(joined) != 1 or before.ndim != 3 or after.shape != before.shape:
            return None
        rows, kept = joined[0], before.shape[1]
        if rows.shape != (before.shape[0], kept + count, before.shape[2]):
            return None

        def last_rows(tokens: int, of: mx.array | None) -> mx.array:
            return mx.contiguous((rows if of is None else rows[of])[:, tokens : tokens + kept])

        return last_rows


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
    replaced: list[tuple[object, str, object]] = [(mx, "concatenate", mx.concatenate)]
    setattr(mx, "concatenate", recorder.concatenate(mx.concatenate))  # noqa: B010  its type is fixed
    for name, (rows, modules) in SCANS.items():
        for module in (sys.modules.get(f"mlx_lm.models.{module}") for module in modules):
            if module is not None:
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, recorder.scan(getattr(module, name), rows))
    try:
        yield
    finally:
        for owner, name, function in replaced:
            setattr(owner, name, function)
    for each in reads:
        each.end(recorder)
