"""Sessions whose layers decode in one forward."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from runner.cache.layers.batch import BatchedLayers, batchable
from runner.cache.session import LiveSession


class DecodeRows:
    """One session over its own layers, or several over a batch: copies of their layers, joined.

    The own layers of a session stand still while it is in a batch. When it leaves, they take over what its row has seen
    since; to the session that looks like one forward. If a batch fails nothing in it can be trusted, but the sessions'
    own layers can: they are only behind.
    """

    def __init__(self, session: LiveSession) -> None:
        self.sessions = [session]
        self._batch: BatchedLayers | None = None
        self._seen = [0]  # forwards of the batch that each session has taken part in

    @property
    def batchable(self) -> bool:
        """True if layers of this kind can be joined."""
        return batchable(self.sessions[0].sequence.states)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that each session has seen."""
        return [session.position + seen for session, seen in zip(self.sessions, self._seen, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch, in addition to the sessions' own layers."""
        return 0 if self._batch is None else self._batch.nbytes

    def compute(
        self, forward: Callable[[mx.array, list[object]], mx.array], tokens: mx.array, *, drafted: bool = False
    ) -> mx.array:
        """Calls `forward(tokens, layers)` of the model over one more token of each, [B, 1], or several of one, [1, L].
        Returns its logits [B, L, V] (lazy).

        If all but the first of several are `drafted`, the session has to `accept` those that are right.
        """
        if self._batch is None:
            session, length = self.sessions[0], tokens.shape[1]
            in_round = length > 1 and session.sequence.markable
            with session.draft_round(length) if in_round else session.forward(length):
                logits = forward(tokens, session.layers)
            if in_round and not drafted:
                session.accept(length)
            return logits
        logits = forward(tokens, self._batch.layers)
        self._seen = [seen + 1 for seen in self._seen]
        return logits

    def arrays(self) -> list[mx.array]:
        """Returns the arrays to evaluate together with the logits of a batch: positions, say, which nothing else may
        need."""
        return [] if self._batch is None else self._batch.arrays()

    def join(self, other: "DecodeRows") -> None:
        """Appends the one session of `other`. Waits for all that both have under way. Raises RuntimeError if one of
        them has a round to accept."""
        (session,) = other.sessions
        if any(each.in_round for each in (*self.sessions, session)):
            raise RuntimeError("layers with drafts in them cannot be joined")
        if self._batch is None:
            self._batch = BatchedLayers([self.sessions[0].layers, session.layers])
        else:
            self._batch.extend([session.layers])
        self.sessions.append(session)
        self._seen.append(0)

    def settle(self, row: int) -> None:
        """Lets the session's own layers take over what its row has seen."""
        count, self._seen[row] = self._seen[row], 0
        if self._batch is not None and count:
            self.sessions[row].absorb(self._batch.batch_caches(), row, count)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, which are ascending. A session that is left alone takes over its row."""
        if len(rows) == 1:
            self.settle(rows[0])
        self.sessions = [self.sessions[row] for row in rows]
        self._seen = [self._seen[row] for row in rows]
        if len(rows) < 2:
            self._batch = None
        elif self._batch is not None:
            self._batch.keep(rows)
