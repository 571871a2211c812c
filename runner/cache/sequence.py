"""All layers of one sequence of tokens, moved together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import mlx.core as mx

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers import adapt, flatten
from runner.cache.layers.adapter import LayerState, Mark
from runner.cache.layers.kv import spare_room
from runner.cache.layers.scans import watched
from runner.cache.layers.snapshot import GROUP_BYTES, Ledger, complete
from runner.cache.sketch import LayerFacts
from runner.device import device

Item = TypeVar("Item")


class Totals:
    """Counts the snapshots, evictions and restored bytes of all sequences of one cache."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.evictions = 0
        self.evicted_bytes = 0
        self.restored_bytes = 0
        """The sum of the bytes of all restored snapshots."""

    def count_eviction(self, nbytes: int) -> None:
        """Counts an eviction that freed `nbytes`. A negative number, if joining two pieces took more, counts as 0."""
        self.evictions += 1
        self.evicted_bytes += max(0, nbytes)


class SequenceMark(NamedTuple):
    """The offset of a sequence's layers before a round."""

    position: int
    """The number of tokens that the layers had seen."""
    length: int
    """The number of tokens of the round."""
    marks: list[tuple[LayerState, Mark]]

    def watched(self) -> AbstractContextManager[None]:
        """Surrounds the call of the model over the round, so that layers can go back to any token of the round."""
        return watched([mark.reads for _, mark in self.marks if mark.reads is not None])


class SequenceLayers:
    """The cache list of a model, and the adapter of every layer in this list. Between forwards all layers that the
    model uses stand at one offset."""

    def __init__(self, facts: LayerFacts, totals: Totals | None = None) -> None:
        """Makes fresh layers. The sequences of one cache share `totals`."""
        self.facts = facts
        self.totals = totals or Totals()
        self.layers = facts.make()
        found = enumerate(flatten(self.layers))
        self.states = [adapt(layer, self.totals.ledger, trusted=slot not in facts.untrusted) for slot, layer in found]
        self.used = [(slot, state) for slot, state in enumerate(self.states) if slot in facts.used]
        """Slot and adapter of every layer that the model uses."""
        self._unused = {*range(len(self.states))} - facts.used
        self.sliceable = all(state.sliceable for _, state in self.used)
        """True if every layer is sliceable."""
        self.markable = bool(self.used) and all(state.markable for _, state in self.used)
        """True if every layer can go back after a round."""
        self.position = 0
        """The number of tokens that the layers have seen."""

    @property
    def passes(self) -> bool:
        """True if every layer holds what it needs at offsets inside a forward that are known before the forward."""
        return self.markable and self.facts.passes

    @property
    def offset(self) -> int:
        """The number of tokens that all layers have seen: the smallest of their offsets."""
        return min((state.offset for _, state in self.used), default=0)

    def page_out(self) -> None:
        """Pages out the snapshots that the next forward would overwrite."""
        if not any(state.live for state in self.states):
            return
        self.page_out_unsliceable()
        for group in self._paged_out():
            for state in group:  # its buffers may come from a much longer conversation
                state.trim(spare_room(self.offset))
            mx.eval([state.arrays() for state in group])

    def _paged_out(self) -> Iterator[list[LayerState]]:
        """Pages out the snapshots that a write into the layers would overwrite. Yields these layers in groups."""
        found = ((state, copies) for state in self.states if (copies := state.page_out()))
        for group in _groups(found, lambda each: sum(array.nbytes for copy in each[1] for array in copy.owned.arrays)):
            complete([copy for _, copies in group for copy in copies])
            yield [state for state, _ in group]

    def restore(self, missing: Sequence[tuple[LayerState, Sequence[Snapshot]]]) -> None:
        """Brings each of these layers to the end of its snapshots, whose bytes are not in the layer."""
        for group in _groups(missing, lambda each: each[0].nbytes + sum(snapshot.nbytes for snapshot in each[1])):
            complete([copy for state, _ in group if state.sliceable for copy in state.page_out()])
            for state, snapshots in group:
                state.restore(snapshots)
            mx.eval([state.arrays() for state, _ in group])

    def passing(self, count: int, offsets: Sequence[int]) -> AbstractContextManager[None]:
        """Surrounds the call of the model over the next `count` tokens, so that the layers hold what they need at the
        `offsets` in this forward, which are in ascending order."""
        stops = [at - self.position for at in offsets]
        reads = [state.watch(count, stops) for _, state in self.used] if stops else []
        return watched([each for each in reads if each is not None])

    def holds(self, at: int) -> bool:
        """Returns True if all layers hold what they need at the offset `at`."""
        return all(state.holds(at) for _, state in self.used)

    def count_forward(self, count: int) -> None:
        """Counts a forward over `count` tokens, after its graph was built without an error. If a layer does not count
        tokens, or is used against the facts, corrects the facts for later sequences and raises RuntimeError."""
        self.position += count
        for state in self.states:
            if state.whole:
                state.count_tokens(count)
        for slot, state in enumerate(self.states):
            if (state.offset != self.position or slot in self._unused) and not state.empty:
                self.facts.correct(slot, state.offset)
                raise RuntimeError(f"layer {slot} is at {state.offset} after {self.position} tokens")

    def rewind(self, to: int) -> Miss:
        """Takes every layer back to `to` tokens. If a layer cannot go back, moves no layer and returns the reason."""
        for _, state in self.used:
            if not state.can_rewind(to):
                return state.refusal
        if any(state.offset != to for _, state in self.used):
            self.page_out_unsliceable()
        for _, state in self.used:
            state.rewind(to)
        self.position = to
        return Miss.NONE

    def mark(self, count: int) -> SequenceMark:
        """Returns a mark for a round over the next `count` tokens. Raises ValueError if `count` is less than 2, and
        TypeError unless the layers are `markable`."""
        if count < 2:
            raise ValueError(f"a round over {count} tokens")
        return SequenceMark(self.position, count, [(state, state.mark(count)) for _, state in self.used])

    def revert(self, mark: SequenceMark, to: int) -> None:
        """Takes every layer back to `to` tokens after the round that followed the mark; or to the mark if any layer
        cannot go back to `to`. Uses up the mark."""
        if to == self.position:
            return
        if not all(state.can_revert(each, to) for state, each in mark.marks):
            to = mark.position
        for state, each in mark.marks:
            state.revert(each, to)
        self.position = to

    def page_out_passed(self) -> None:
        """Pages out the states at offsets inside the last forward, if there are any."""
        if any(state.passed_arrays() for state in self.states):
            self.page_out_unsliceable()

    def page_out_unsliceable(self) -> None:
        """Pages out the live snapshots of the layers that are not sliceable. Called before these layers move."""
        complete([copy for _, state in self.used if not state.sliceable for copy in state.page_out()])

    def reset(self) -> None:
        """Pages out the live snapshots of every layer, then empties the layer, in the same object."""
        self.page_out_unsliceable()
        for state in self.states:
            if state.sliceable and not state.empty:
                state.rewind(0)
        for group in self._paged_out():
            for state in group:
                state.reset()
        for state in self.states:
            state.reset()
        self.position = 0

    def discard(self) -> None:
        """Empties every layer, and loses the layers' live snapshots."""
        for state in self.states:
            state.discard()

    def trim(self, room: int) -> None:
        """Frees the room in buffers that is beyond the next `room` tokens."""
        for state in self.states:
            state.trim(room)
        self.evaluate()

    def arrays(self) -> list[mx.array]:
        return [array for state in self.states for array in (*state.arrays(), *state.passed_arrays())]

    def evaluate(self) -> None:
        """Evaluates the arrays of all layers. Raises the errors of MLX."""
        mx.eval(self.arrays())

    @property
    def nbytes(self) -> int:
        """The bytes of the layers, including room for later tokens, without snapshots that own their bytes."""
        passed = sum(array.nbytes for state in self.states for array in state.passed_arrays())
        return passed + sum(state.nbytes for state in self.states)

    def measure(self) -> None:
        """Notes the bytes of these layers in the facts."""
        self.facts.measure(state for _, state in self.used)

    def tokens_within(self, budget_bytes: int) -> int:
        """Returns the number of tokens in the layers that would fit into `budget_bytes`."""
        sliceable = sum(state.nbytes for state in self.states if state.sliceable)
        return max(0, budget_bytes - self.nbytes + sliceable) * self.offset // max(1, sliceable)

    def absorb(self, batch_caches: Sequence[object], row: int, count: int) -> None:
        """Appends the last `count` tokens of a batch's row; `batch_caches` are the batch's layers. Call it in place of
        a forward, between `page_out` and `count_forward`."""
        for batch_cache, state in zip(batch_caches, self.states, strict=True):
            state.absorb(batch_cache, row, count)

    def live(self) -> set[Snapshot]:
        """Returns the snapshots that are live in these layers."""
        return {snapshot for state in self.states for snapshot in state.live}


def _groups(items: Iterable[Item], nbytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yields the items in groups of more than GROUP_BYTES; the last group has what is left, which may be nothing."""
    group, held, most = list[Item](), 0, GROUP_BYTES[device()]
    for item in items:
        group.append(item)
        held += nbytes(item)
        if held > most:
            yield group
            group, held = [], 0
    yield group
