"""Layers that remember what they saw, in place of mlx-lm's classes: a token is a byte, and nothing is computed.

Three stand-ins for its classes, and an adapter for each on the same base classes as the real adapters, with which they
are found in the same table. So ledger, live snapshots and the rules of whole states are the real ones; buffers,
contents and sizes are made of plain integers, and exact.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import mlx.core as mx

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers import _ADAPTERS
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.snapshot import LayerSnapshot, Owned, StateSnapshot, complete
from runner.cache.layers.states import CountedState
from runner.cache.sketch import LayerFacts

WINDOW = 4
STATE_BYTES = 16
ENTRY = mx.zeros((1, 1, 1, 1), mx.uint8)  # what a token takes, for whoever asks for the shape of arrays

Content: TypeAlias = tuple[int, ...]


class FakeLayer:
    """Stands for a layer cache of mlx-lm: the model writes to it, and reads it."""

    def see(self, tokens: Sequence[int]) -> None:
        """Runs a forward over these tokens."""
        raise NotImplementedError

    def view(self) -> Content:
        """Returns what attention finds."""
        raise NotImplementedError

    def held(self, start: int, stop: int) -> Content:
        """Returns what it holds of these tokens: everything it shows, if it can only be taken whole."""
        return self.view()

    @property
    def nbytes(self) -> int:
        raise NotImplementedError


class FakeKV(FakeLayer):
    """Shows every token. Its buffer is overwritten from the offset on; the tokens behind are stale, but there."""

    def __init__(self) -> None:
        self.buffer: list[int] = []
        self.offset = 0

    def see(self, tokens: Sequence[int]) -> None:
        end = self.offset + len(tokens)
        self.buffer[self.offset : end] = tokens
        self.offset = end

    def view(self) -> Content:
        return tuple(self.buffer[: self.offset])

    def held(self, start: int, stop: int) -> Content:
        return tuple(self.buffer[start:stop])

    @property
    def nbytes(self) -> int:
        return len(self.buffer)


class FakeWindow(FakeKV):
    """Shows the last WINDOW tokens, and has forgotten the others for good."""

    def see(self, tokens: Sequence[int]) -> None:
        self.buffer = [*self.buffer, *tokens][-WINDOW:]
        self.offset += len(tokens)

    def view(self) -> Content:
        return tuple(self.buffer)

    def held(self, start: int, stop: int) -> Content:
        first = self.offset - len(self.buffer)
        return super().held(start - first, stop - first)


class FakeRecurrent(FakeLayer):
    """Shows one number made of everything it saw, and counts nothing."""

    def __init__(self) -> None:
        self.state: Content = ()

    def see(self, tokens: Sequence[int]) -> None:
        state = sum(self.state)
        for token in tokens:
            state = hash((state, token))
        self.state = (state,)

    def view(self) -> Content:
        return self.state

    @property
    def nbytes(self) -> int:
        return STATE_BYTES * len(self.state)


class FakeSlice(LayerSnapshot):
    """Some tokens of a FakeKV."""

    at_checkpoints = False

    @property
    def nbytes(self) -> int:
        return len(content_of(self)) if self._owned else 0

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        if not self.start < at < self.stop:
            raise ValueError(f"cannot cut {self.start}..{self.stop} at {at}")
        halves = self._part(self.start, at), self._part(at, self.stop)
        self.close()
        return halves

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is None:
            self.close()
            return None
        return self._joined(first, first.start)

    def _joined(self, first: Snapshot, start: int) -> Snapshot:
        assert isinstance(first, type(self))
        assert start < self.start <= first.stop
        if self._stays_live(first):
            joined = type(self)(start, self.stop, self.owner, self._ledger)
        else:
            both = (*content_of(first)[start - first.start : self.start - first.start], *content_of(self))
            joined = type(self)(start, self.stop, None, self._ledger, Owned(both, []))
        first.close()
        self.close()
        return joined

    def _part(self, start: int, stop: int) -> "FakeSlice":
        if self.owner is not None:
            return type(self)(start, stop, self.owner, self._ledger)
        part = content_of(self)[start - self.start : stop - self.start]
        return type(self)(start, stop, None, self._ledger, Owned(part, []))

    def _stays_live(self, first: "FakeSlice") -> bool:
        return self.owner is not None and self.owner is first.owner


class FakeTail(FakeSlice):
    """The last tokens of an edge, as many as a FakeWindow shows."""

    at_checkpoints = True

    def _stays_live(self, first: FakeSlice) -> bool:
        return self.owner is not None and self.owner.offset == self.stop

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        return (None, self) if at <= self.start else super().split(at)

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is None:
            return self
        start = max(first.start, self.stop - WINDOW)
        if first.stop < self.start or start >= self.start:
            first.close()
            return self
        return self._joined(first, start)


class FakeState(StateSnapshot):
    """The number of a FakeRecurrent."""

    @property
    def nbytes(self) -> int:
        return STATE_BYTES if self._owned else 0


class Sized(LayerState):
    """The base of the adapters: no arrays, and the bytes that their layer says it has."""

    layer: FakeLayer

    def content(self, at: int) -> Content:
        assert at == self.offset
        return self.layer.view()

    def copy_tokens(self, start: int, stop: int) -> Owned:
        return Owned(self.layer.held(start, stop), [])

    def arrays(self) -> list[mx.array]:
        return []

    @property
    def empty(self) -> bool:
        return self.layer.nbytes == 0

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes


class FakeKVState(Sized):
    kind = FakeSlice
    sliceable = True
    markable = True
    layer: FakeKV

    def arrays(self) -> list[mx.array]:
        return [] if self.empty else [ENTRY]

    @staticmethod
    def needs(at: int) -> int:
        return 0

    @property
    def offset(self) -> int:
        return self.layer.offset

    def can_rewind(self, to: int) -> bool:
        return 0 <= to <= self.offset

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            assert isinstance(snapshot, FakeSlice)
            if snapshot.start != self.offset:
                raise ValueError(f"a layer at {self.offset} cannot go on with {snapshot.start}..{snapshot.stop}")
            if snapshot in self.live:
                self.layer.offset = snapshot.stop
            else:
                complete(self.page_out())
                self.layer.see(content_of(snapshot))
                if not snapshot.live:  # in another layer, where it stays
                    snapshot.page_in(self)

    def trim(self, room: int) -> None:
        if len(self.layer.buffer) - self.offset > room:
            del self.layer.buffer[self.offset :]

    def _go_back(self, to: int) -> None:
        self.layer.offset = to

    def _endangered(self, snapshot: Snapshot) -> bool:
        return snapshot.stop > self.offset


class FakeWindowState(Sized):
    kind = FakeTail
    refusal = Miss.WINDOW_PASSED
    markable = True
    layer: FakeWindow

    @property
    def offset(self) -> int:
        return self.layer.offset

    @staticmethod
    def needs(at: int) -> int:
        return max(0, at - WINDOW)

    def can_rewind(self, to: int) -> bool:
        return to == self.offset or 0 <= to < self.offset <= WINDOW

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        self._check_none_live()
        at = stop = snapshots[-1].stop
        window: Content = ()
        for snapshot in reversed(snapshots):
            start = max(snapshot.start, self.needs(stop))
            if snapshot.stop >= at > start:
                window = (*content_of(snapshot)[start - snapshot.start : at - snapshot.start], *window)
                at = start
        if at != self.needs(stop):
            raise ValueError(f"tokens {self.needs(stop)}..{at} are missing to stand at {stop}")
        self.layer.buffer, self.layer.offset = list(window), stop

    def _go_back(self, to: int) -> None:
        self.layer.buffer, self.layer.offset = self.layer.buffer[:to], to

    def _rewinds_after(self, count: int) -> bool:
        return self.offset + count <= WINDOW


class FakeRecurrentState(Sized, CountedState):
    kind = FakeState
    markable = True
    layer: FakeRecurrent

    def _set(self, content: object) -> None:
        self.layer.state = cast("Content", content)


_ADAPTERS.update({FakeKV: FakeKVState, FakeWindow: FakeWindowState, FakeRecurrent: FakeRecurrentState})

# K: keys and values only. S: with a window. R: with a recurrent layer. P: nothing but recurrent layers, no clock at all
FAMILIES: dict[str, tuple[type[FakeLayer], ...]] = {
    "K": (FakeKV, FakeKV),
    "S": (FakeKV, FakeWindow),
    "R": (FakeKV, FakeRecurrent),
    "P": (FakeRecurrent, FakeRecurrent),
}


def facts_of_fakes(
    kinds: Sequence[type[FakeLayer]], make_layers: Callable[[], list[object]] | None = None
) -> LayerFacts:
    """Returns what layers of these kinds hold."""
    made = make_layers or (lambda: [kind() for kind in kinds])
    fixed = WINDOW * kinds.count(FakeWindow) + STATE_BYTES * kinds.count(FakeRecurrent)
    return LayerFacts(made, frozenset(range(len(kinds))), frozenset(), kinds.count(FakeKV), fixed, fixed)


def content_of(snapshot: Snapshot) -> Content:
    """Returns what restoring the snapshot would bring back, wherever its content is now."""
    assert isinstance(snapshot, LayerSnapshot)
    owner = snapshot.owner
    if owner is None:
        return cast("Content", snapshot.owned.content)
    assert isinstance(owner, Sized)
    # A part of a live window ends before the layer does.
    assert owner.offset == snapshot.stop or not owner.whole, "live in a layer that stands elsewhere"
    return owner.layer.held(snapshot.start, snapshot.stop)


def shown(kind: type[FakeLayer], tokens: Sequence[int]) -> Content:
    """Returns what a fresh layer shows after these tokens."""
    fresh = kind()
    fresh.see(tokens)
    return fresh.view()
