"""What is known of the layers of one model, whichever of its stacks it was learned from."""

from runner.cache.layers.snapshot import Ledger


class LayerFacts:
    """Shared by all stacks over the layers of one model; slots are indices of leaves in the order of `flatten`."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        """Of the snapshots of all stacks."""
        self.untrusted: set[int] = set()
        """Slots of leaves whose clocks have been found to be wrong."""
        self.used: set[int] = set()
        """Slots that a forward has filled so far: a layer that stays empty while others fill is one that the model does
        not use."""
        self.token_bytes = 0
        """Of all sliceable layers for a token more."""
        self.tail_bytes = 0
        """Of all layers with a tail, the most that was seen."""
        self.state_bytes = 0
        """Of all layers with a state, the most that was seen."""
        self.evictions = 0
        """How often something was ever given up for want of room."""
        self.evicted_bytes = 0
        """What it had."""
        self.restored_bytes = 0
        """What snapshots that layers ever took up again owned."""

    def bytes_of(self, tokens: int) -> int:
        """About what a stack takes after so many tokens; 0 before the first forward."""
        return self.token_bytes * tokens + self.tail_bytes + self.state_bytes

    def count_eviction(self, nbytes: int) -> None:
        """Something was given up that had so many bytes; none where joining two pieces took as much."""
        self.evictions += 1
        self.evicted_bytes += max(0, nbytes)

    def most_checkpoints(self, budget_bytes: int | None) -> int | None:
        """How many restore points one prompt may leave, so that their states take a quarter of the budget at most.
        Windows cost no more than their tokens, wherever they are cut."""
        return max(1, budget_bytes // 4 // self.state_bytes) if budget_bytes and self.state_bytes else None
