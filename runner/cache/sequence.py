"""All layers of one sequence of tokens, moved together, and what is known about the layers of a model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import mlx.core as mx

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers import adapt, distrust, flatten
from runner.cache.layers.adapter import LayerState, Mark
from runner.cache.layers.kv import spare_room
from runner.cache.layers.scans import watched
from runner.cache.layers.snapshot import TOGETHER_BYTES, Copy, Ledger, complete
from runner.logs import Log

log = Log(__name__)


class LayerFacts:
    """Facts shared by all sequences of one model. A slot is the index of a layer in the order of `flatten`."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        """Counts the snapshots of all sequences."""
        self.untrusted: set[int] = set()
        """Slots of layers whose own token counts have proved wrong."""
        self.used: set[int] = set()
        """Slots that a forward has filled so far. The model does not use a layer that stays empty while others fill."""
        self.token_bytes = 0
        """Bytes of one more token in all sliceable layers."""
        self.tail_bytes = 0
        """The most bytes seen in all layers with a tail."""
        self.state_bytes = 0
        """The most bytes seen in all layers with a state."""
        self.evictions = 0
        """The number of evictions so far."""
        self.evicted_bytes = 0
        """Bytes freed by them."""
        self.restored_bytes = 0
        """Bytes of the snapshots that layers have ever restored."""

    def bytes_of(self, tokens: int) -> int:
        """Returns about how many bytes a sequence of `tokens` tokens takes; 0 before the first forward."""
        return self.token_bytes * tokens + self.tail_bytes + self.state_bytes

    def count_eviction(self, nbytes: int) -> None:
        """Counts an eviction that freed `nbytes`; a negative number (joining two pieces took more) counts as 0."""
        self.evictions += 1
        self.evicted_bytes += max(0, nbytes)

    def most_checkpoints(self, budget_bytes: int | None) -> int | None:
        """Returns how many checkpoints one prompt may leave, so that their states take at most a quarter of the budget.
        None is no limit: windows cost no more than their tokens, wherever they are split."""
        return max(1, budget_bytes // 4 // self.state_bytes) if budget_bytes and self.state_bytes else None


class SequenceMark(NamedTuple):
    """Where the layers of a sequence stood before a round."""

    position: int
    """The number of tokens that they had seen."""
    length: int
    """The number of tokens of the round."""
    marks: list[tuple[LayerState, Mark]]

    def watched(self) -> AbstractContextManager[None]:
        """Surrounds the call of the model over the round, so that layers can go back to any token of it."""
        return watched([mark.reads for _, mark in self.marks if mark.reads is not None])


class SequenceLayers:
    """The cache list of a model and the adapter of every layer in it.

    Between forwards all layers stand at one offset. A layer that stays empty while others fill is not used by the model
    and is left out of account.
    """

    def __init__(self, layers: list[object], facts: LayerFacts | None = None) -> None:
        """`layers` is a fresh cache list; the sequences of one model share `facts`."""
        self.layers = layers
        self.facts = facts or LayerFacts()
        ledger, untrusted = self.facts.ledger, self.facts.untrusted
        found = enumerate(flatten(layers))
        self.states = [adapt(layer, ledger, trusted=index not in untrusted) for index, layer in found]
        self._used: list[tuple[int, LayerState]] = []
        self.position = 0
        """The number of tokens that the layers have seen."""

    @property
    def used(self) -> list[tuple[int, LayerState]]:
        """Slot and adapter of every layer that a forward has filled so far, in any sequence, even if it was reset
        since."""
        if len(self._used) < len(self.facts.used):
            self._used = [(index, self.states[index]) for index in sorted(self.facts.used)]
        return self._used

    @property
    def sliceable(self) -> bool:
        """True if every layer is sliceable. Before the first forward, layers that may prove unused count too."""
        return all(state.sliceable for _, state in self.used or enumerate(self.states))

    @property
    def markable(self) -> bool:
        """True if the layers can go back after a round."""
        return bool(self.used) and all(state.markable for _, state in self.used)

    @property
    def offset(self) -> int:
        """The number of tokens that every layer has surely seen: the least of all offsets."""
        return min((state.offset for _, state in self.used), default=0)

    def page_out(self) -> None:
        """Pages out the snapshots that the next forward would overwrite."""
        for state in self.states:
            if state.live:
                break
        else:
            return
        self.page_out_unsliceable()
        group: list[tuple[LayerState, list[Copy]]] = []
        for state in self.states:  # in groups: all copies at once would need as much memory again
            if copies := state.page_out():
                group.append((state, copies))
                if sum(array.nbytes for _, each in group for copy in each for array in copy.arrays) > TOGETHER_BYTES:
                    self._complete(group)
                    group = []
        self._complete(group)

    def _complete(self, group: list[tuple[LayerState, list[Copy]]]) -> None:
        """Evaluates copies for snapshots of these layers, whose buffers may be those of a much longer conversation that
        has just been paged out."""
        complete([copy for _, copies in group for copy in copies])
        for state, _ in group:
            state.trim(spare_room(self.offset))
        mx.eval([state.arrays() for state, _ in group])

    def advance(self, count: int) -> bool:
        """Counts a forward over `count` tokens that was built without an error. Returns True if a layer has proved to
        count something other than tokens."""
        self.position += count
        for state in self.states:
            if state.whole:
                state.advance(count)
        facts = self.facts
        if len(facts.used) < len(self.states):
            facts.used.update(index for index, state in enumerate(self.states) if not state.empty)
        untrusted = len(facts.untrusted)
        for index, state in self.used:
            if state.offset != self.position and not state.empty:
                log.info(
                    "a layer counts something other than tokens: its state is stored whole",
                    layer=index,
                    at=state.offset,
                )
                facts.untrusted.add(index)
                self._replace(index, distrust(state, self.position))
        return len(facts.untrusted) > untrusted

    def rewind(self, to: int) -> Miss:
        """Takes every layer back to `to` tokens. If one cannot go, moves none and returns the reason."""
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
        """Returns a mark before a round over `count` tokens. Raises ValueError if they are fewer than 2, and TypeError
        unless the layers are `markable`."""
        if count < 2:
            raise ValueError(f"a round over {count} tokens")
        return SequenceMark(self.position, count, [(state, state.mark(count)) for _, state in self.used])

    def revert(self, mark: SequenceMark, to: int) -> None:
        """Takes every layer, after the round that followed the mark, back to `to` tokens; to where the mark was made if
        one cannot stand there. Uses up the mark.

        Raises RuntimeError if an adapter was replaced meanwhile.
        """
        if to == self.position:
            return
        if any(marked is not state for (marked, _), (_, state) in zip(mark.marks, self.used, strict=True)):
            raise RuntimeError("a layer has proved to be untrusted in a round, and cannot go back")
        if not all(state.can_revert(each, to) for state, each in mark.marks):
            to = mark.position
        for state, each in mark.marks:
            state.revert(each, to)
        self.position = to

    def page_out_unsliceable(self) -> None:
        """Pages out the live snapshots of the layers that are not sliceable, before these move."""
        complete([copy for _, state in self.used if not state.sliceable for copy in state.page_out()])

    def reset(self) -> None:
        """Empties every layer, keeping the same objects. Pages out their live snapshots first."""
        self.page_out_unsliceable()
        for state in self.states:
            if state.sliceable and not state.empty:
                state.rewind(0)
                complete(state.page_out())
            state.reset()
        self.position = 0

    def discard(self) -> None:
        """Empties every layer and loses its live snapshots."""
        for state in self.states:
            state.discard()

    def trim(self, room: int) -> None:
        """Frees buffer room beyond the next `room` tokens."""
        for state in self.states:
            state.trim(room)
        self.evaluate()

    def arrays(self) -> list[mx.array]:
        return [array for state in self.states for array in state.arrays()]

    def evaluate(self) -> None:
        """Evaluates the arrays of all layers. Raises what MLX raises."""
        mx.eval(self.arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of the layers, including room for tokens to come. The ledger counts those of snapshots."""
        return sum(state.nbytes for state in self.states)

    def measure(self) -> None:
        """Notes in the facts how many bytes these layers take."""
        if not self.offset:
            return
        facts = self.facts
        states = sum(state.nbytes for _, state in self.used if state.whole)
        other = self._other_bytes()
        sliceable = [array for _, state in self.used if state.sliceable for array in state.arrays()]
        # Unused room is not counted.
        facts.token_bytes = sum(array.nbytes // max(1, array.shape[-2]) for array in sliceable)
        facts.tail_bytes = max(facts.tail_bytes, other - states)
        facts.state_bytes = max(facts.state_bytes, states)

    def tokens_within(self, budget_bytes: int) -> int:
        """Returns how many of the tokens in the layers would fit into `budget_bytes`."""
        other = self._other_bytes()
        return max(0, budget_bytes - other) * self.offset // max(1, self.nbytes - other)

    def _other_bytes(self) -> int:
        return sum(state.nbytes for _, state in self.used if not state.sliceable)

    def absorb(self, batch_caches: Sequence[object], row: int, count: int) -> None:
        """Takes over what the last `count` tokens left in a row of a batch, given its layers, in place of a forward:
        between `page_out` and `advance`."""
        for batch_cache, state in zip(batch_caches, self.states, strict=True):
            state.absorb(batch_cache, row, count)

    def live(self) -> set[Snapshot]:
        """Returns the snapshots whose bytes are in these layers."""
        return {snapshot for state in self.states for snapshot in state.live}

    def replace_untrusted(self) -> None:
        """Replaces the adapters of layers that another sequence has found to be untrusted."""
        for index, state in self.used:
            if index in self.facts.untrusted:
                self._replace(index, distrust(state, self.position))

    def _replace(self, index: int, state: LayerState) -> None:
        """Replaces an adapter whose layer counts something else (groups of tokens, say): rewinding by that would be
        wrong."""
        self.states[index] = state
        self._used = [(other, state if other == index else each) for other, each in self.used]


def measured(layers: list[object], tokens: int) -> LayerFacts:
    """Returns the facts that the layers of one sequence show, which have seen this many tokens. Computes nothing."""
    sequence = SequenceLayers(layers)
    sequence.advance(tokens)
    sequence.measure()
    return sequence.facts
