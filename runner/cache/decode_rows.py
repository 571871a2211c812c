"""Sessions whose layers go through the forwards of a decode together."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from runner.cache.layers.batch import BatchedLayers, batchable
from runner.cache.session import LiveSession


class DecodeRows:
    """One session on its own layers, or several on a batch: copies of their layers, joined.

    While a session is in a batch its own layers stand still. When it leaves they take over what its row has seen since,
    which to the session looks like one forward. If something about the batch fails, nothing in it can be trusted; the
    sessions' own layers can, they are just behind.
    """

    def __init__(self, session: LiveSession) -> None:
        self.sessions = [session]
        self._batch: BatchedLayers | None = None
        self._seen = [0]  # forwards of the batch that each has gone through

    @property
    def batchable(self) -> bool:
        """Whether layers of this kind can be joined."""
        return batchable(self.sessions[0].sequence.states)

    @property
    def lengths(self) -> list[int]:
        """How many tokens each has seen."""
        return [session.position + seen for session, seen in zip(self.sessions, self._seen, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch, beside those of the sessions' own layers."""
        return 0 if self._batch is None else self._batch.nbytes

    def compute(self, forward: Callable[[mx.array, list[object]], mx.array], tokens: mx.array) -> mx.array:
        """Calls `forward(tokens, layers)` of the model over one more token of each, [B, 1], or several of one, [1, L].
        Returns its logits [B, L, V] (lazy)."""
        if self._batch is None:
            session = self.sessions[0]
            with session.forward(tokens.shape[1]):
                return forward(tokens, session.layers)
        logits = forward(tokens, self._batch.layers)
        self._seen = [seen + 1 for seen in self._seen]
        return logits

    def arrays(self) -> list[mx.array]:
        """What to evaluate together with the logits of a batch: positions, say, which nothing else may ask for."""
        return [] if self._batch is None else self._batch.arrays()

    def join(self, other: "DecodeRows") -> None:
        """Puts the one session of `other` behind its own ones. Waits for what both have under way."""
        (session,) = other.sessions
        if self._batch is None:
            self._batch = BatchedLayers([self.sessions[0].layers, session.layers])
        else:
            self._batch.extend([session.layers])
        self.sessions.append(session)
        self._seen.append(0)

    def settle(self, row: int) -> None:
        """The session's own layers take over what its row has seen."""
        count, self._seen[row] = self._seen[row], 0
        if self._batch is not None and count:
            self.sessions[row].absorb(self._batch.leaves(), row, count)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these stay, in this order, which is ascending. One that stays alone settles."""
        if len(rows) == 1:
            self.settle(rows[0])
        self.sessions = [self.sessions[row] for row in rows]
        self._seen = [self._seen[row] for row in rows]
        if len(rows) < 2:
            self._batch = None
        elif self._batch is not None:
            self._batch.keep(rows)
