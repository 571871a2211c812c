"""The facts known about the layers of one model, whichever of its sequences they were learned from."""

from runner.cache.layers.snapshot import Ledger


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
