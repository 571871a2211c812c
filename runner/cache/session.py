"""Sessions: each request's use of the layers, alone and in a batch."""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import mlx.core as mx

from runner.cache.checkpoints import Checkpoint
from runner.cache.layer_interface import Match
from runner.cache.layers.batched import BatchedLayers, batchable
from runner.cache.node import Node, keys
from runner.cache.sequence import SequenceLayers, SequenceMark
from runner.cache.trie import PrefixTrie
from runner.logs import Log

log = Log(__name__)
_NOT_READY = "a forward in a session that is closed or failed, or has a round to accept"

_FEW = 16
"""The most tokens of a prompt to compute after its known first token was sent: a repeat has no more, whatever the
layers."""
CHECK_TOKENS = 64
"""The decode steps between two checks of the bytes held; layers grow by more tokens at a time."""


class Session:
    """One request's use of the layers, from `begin` to `close`.

    `total`, `matched` and `cached` count tokens: the prompt, the prefix it shares with the cache, and the part of that
    prefix which need not be evaluated again. `remaining` is the rest of the prompt, never empty. `recorded` is the
    prompt and the tokens sampled since. `layers` is the `cache=` argument of the model's forward; while decoding they
    are up to one token ahead of the record.

    A *round* is a forward over several tokens of the answer, the first of which may prove right:

        with session.draft_round(n):            # the token that is next anyway, and n - 1 drafts after it
            logits = model(tokens, session.layers)
        ...                                     # find out that the first m tokens are right
        if not session.accept(m):               # True: the session stands after these m tokens
            ...                                 # False: it stands where it did; compute these m once more

    Until `accept` the session stands where it did before, whatever its layers hold. Several tokens that are computed
    once more are a round, which is then accepted as a whole, and may have further drafts after them. Record drafts once
    they are known to be right, before `accept` or after it.
    """

    def __init__(
        self, sequence: SequenceLayers, prompt: list[int], match: Match, end: Callable[["Session"], None]
    ) -> None:
        """The first `close` calls `end(session)`."""
        self.sequence = sequence
        self.layers = sequence.layers
        self.total = len(prompt)
        self.matched, self.cached, self.miss = match
        self._end: Callable[[Session], None] | None = end
        self._evicted_bytes = sequence.totals.evicted_bytes
        self.recorded = prompt
        self.first: int | None = None
        """The first token of the answer, if it is known and not recorded yet. Meanwhile the layers may have seen the
        whole prompt: record it, or call `forget_first`, before computing."""
        self.next_check_at = 0
        """The position after which a forward of a single token calls `_check`, too."""
        self.failed = False
        """True during a forward and after an interrupted one: nothing in the layers can be trusted. Set it if an
        evaluation has raised; `close` then frees everything."""
        self.cache_invalid = False
        """True if the cache's own part of a forward was interrupted: nothing in the cache can be trusted."""
        self.distrusted = False
        """True if the session has computed NaN or infinity: `close` keeps nothing of it."""
        self._mark: SequenceMark | None = None  # of the round that has to be accepted
        self._ready = True  # neither closed nor in a round

    @property
    def remaining(self) -> list[int]:
        """The tokens of the prompt that were not cached."""
        return self.recorded[self.cached : self.total]

    @property
    def position(self) -> int:
        """The number of tokens that the layers have seen."""
        return self.sequence.position

    @property
    def evicted_bytes(self) -> int:
        """Bytes that the cache has evicted since the session began, for any session."""
        return self.sequence.totals.evicted_bytes - self._evicted_bytes

    def state(self) -> list[mx.array]:
        """Returns every array of every layer, to evaluate after a forward."""
        return self.sequence.arrays()

    def next_forward(self, most: int) -> int:
        """Returns the number of tokens of the next prefill forward, at most `most`; 0 once only the last is left, which
        belongs to the first decode step. Raises ValueError unless `most` is positive.

        The tokens are the next ones of `recorded` from `position` on. In a session that was set back (its layers have
        seen fewer tokens than are recorded) sampled tokens are among them.
        """
        if most < 1:
            raise ValueError(f"a prefill forward of {most} tokens")
        stop = min(len(self.recorded) - 1, self._next_checkpoint() or len(self.recorded))
        return max(0, min(most, stop - self.position))

    @contextmanager
    def forward(self, count: int) -> Iterator[None]:
        """Surrounds the call of the model over the next `count` tokens, and nothing that may fail for other reasons.

        MLX is lazy: the block may contain the evaluation, but need not. An exception inside leaves layers at
        different offsets, or in an unknown state; the session then ends with everything freed.
        """
        if not self._ready or self.failed:
            raise RuntimeError(_NOT_READY)
        self.failed = self.cache_invalid = True
        self.sequence.page_out()
        self.cache_invalid = False
        yield
        self.cache_invalid = True
        self.sequence.count_forward(count)
        if count > 1 or self.sequence.position >= self.next_check_at:
            self._check(count, stepwise=count == 1)
        self.failed = self.cache_invalid = False

    def absorb(self, batch_caches: Sequence[object], row: int, count: int) -> None:
        """Takes over the last `count` tokens of a row of a batch, given its layers."""
        with self.forward(count):
            self.sequence.absorb(batch_caches, row, count)
            self.sequence.evaluate()  # an unevaluated slice would keep the whole batch alive

    def record(self, token: int) -> None:
        """Records a sampled token, or the token that ends a generation. Call it as soon as the token is known, whether
        or not its forward was dispatched already."""
        self.recorded.append(token)

    def continuation(self, most: int) -> list[int]:  # noqa: ARG002
        """Returns up to `most` tokens that followed all recorded ones in another conversation; pictures end them."""
        return []

    def forget_first(self) -> None:
        """Forgets the known first token. The layers have not seen the last token of the prompt afterwards."""
        self.first = None

    def forget_first_if_far(self) -> None:
        """Forgets the known first token if more than a few tokens of the prompt are left: the answer would pause after
        it while they are computed."""
        if self.first is not None and self.total - self.position > _FEW:
            self.forget_first()

    def close(self) -> None:
        """Ends the session; call it in a `finally`. A second call does nothing.

        Rewinds all layers to the tokens that are both recorded and seen, and stores them. If the session has `failed`,
        or when a layer cannot be rewound, frees everything and logs it.
        """
        end, self._end = self._end, None
        if end is None:
            return
        mark = self._mark
        if mark is not None and not self.failed:
            try:
                # The tokens recorded after the first one need not be the drafts that the layers hold.
                self.accept(int(len(self.recorded) > mark.position))
            except Exception:
                log.exception("a round could not be taken back")
        self._mark = None
        self._ready = False
        self.failed |= self.distrusted
        end(self)

    def _next_checkpoint(self) -> int | None:
        """Returns the next offset at which a prefill forward has to end, or None."""
        return None

    def _check(self, count: int, *, stepwise: bool) -> None:
        """Follows a forward over `count` tokens, or, if `stepwise`, `count` steps of one token each. Called after
        several tokens, and at `next_check_at`."""

    @property
    def in_round(self) -> bool:
        """True if a round has to be accepted before anything else is computed."""
        return self._mark is not None

    @contextmanager
    def draft_round(self, count: int) -> Iterator[None]:
        """Surrounds the call of the model over the next `count` tokens, at least 2, as `forward` does; `accept` has to
        follow. Raises ValueError for fewer tokens, and TypeError unless `sequence.markable`."""
        if not self._ready or self.failed:
            raise RuntimeError(_NOT_READY)
        mark = self.sequence.mark(count)
        self.failed = self.cache_invalid = True
        self.sequence.page_out()
        self.cache_invalid = self._ready = False
        with mark.watched():
            yield
        self._mark = mark
        self.failed = False

    def accept(self, count: int) -> bool:
        """Ends a round whose first `count` tokens are right. Returns True if the session now stands after these, as if
        they had been computed one by one; False if a layer cannot, and the session stands where it did before.

        Raises RuntimeError if there is no round to end, and ValueError if it has fewer tokens.
        """
        mark = self._mark
        if mark is None:
            raise RuntimeError("no round to accept")
        if not 0 <= count <= mark.length:
            raise ValueError(f"{count} of the {mark.length} tokens of a round")
        self._mark = None
        self.failed = self.cache_invalid = True
        self.sequence.count_forward(mark.length)
        self.sequence.revert(mark, mark.position + count)
        passed = self.position - mark.position
        if self.position >= self.next_check_at:
            self._check(passed, stepwise=True)
        self.failed = self.cache_invalid = False
        self._ready = True
        return passed == count


class TrieSession(Session):
    """A session along a path of the trie. Its prefill stops at checkpoints."""

    def __init__(
        self,
        sequence: SequenceLayers,
        prompt: list[int],
        match: Match,
        node: Node,
        trie: PrefixTrie,
        check: Callable[["TrieSession", int, bool], None],
        go_back: Callable[["TrieSession", int], None],
        end: Callable[[Session], None],
    ) -> None:
        """`node` of the trie is where the layers stand. `check(session, count, stepwise)` is called as `_check` is;
        `go_back(session, to)` takes layers that are ahead of the record back to `to` tokens."""
        super().__init__(sequence, prompt, match, end)
        self._trie = trie
        self._check_cache = check
        self._go_back = go_back
        self.node = node
        """The last node that the session has reached; locked."""
        self.checkpoints: list[Checkpoint] = []
        self.detached = False
        """True if the trie was cleared under this session: it keeps its layers, and stores nothing."""
        self._left_at: Node | None = None  # the tokens recorded after this node are no path of the trie

    def add_checkpoint(self, at: int) -> None:
        """Adds a stop to the prefill, where another prompt diverges from this one."""
        if all(each.at != at for each in self.checkpoints):
            insort(self.checkpoints, Checkpoint(at, keep=False))
            self.next_check_at = min(self.next_check_at, at)

    def continuation(self, most: int) -> list[int]:
        if self.detached or self._left_at is self.node or most < 1:
            return []
        ahead = self.recorded[self.node.end :]
        if ahead and ahead[0] not in self.node.children:
            return []  # the usual case, and the cheapest
        found = self._trie.continuation(self.node, keys(ahead), most).tolist()
        if ahead and not found:
            self._left_at = self.node  # for good: recorded tokens stay
        return [*takewhile(lambda token: token >= 0, found)]

    def forget_first(self) -> None:
        super().forget_first()
        at = len(self.recorded) - 1
        if self.position <= at:
            return
        self.failed = self.cache_invalid = True
        if self.detached:
            self.sequence.rewind(at)
        else:
            self._go_back(self, at)
        self.failed = self.cache_invalid = False

    def _next_checkpoint(self) -> int | None:
        return next((each.at for each in self.checkpoints if each.at > self.position), None)

    def _check(self, count: int, *, stepwise: bool) -> None:
        self._check_cache(self, count, stepwise)
        self.next_check_at = self.position - self.position % CHECK_TOKENS + CHECK_TOKENS
        if self.checkpoints:
            self.next_check_at = min(self.next_check_at, self.checkpoints[0].at)


class DecodeRows:
    """One session over its own layers, or several over a batch: copies of their layers, joined.

    The own layers of a session stand still while it is in a batch. When it leaves, they take over the tokens that its
    row has seen since; to the session that looks like one forward. If a batch fails, nothing in it can be trusted; the
    sessions' own layers can, and are only behind.
    """

    def __init__(self, session: Session) -> None:
        self.sessions = [session]
        self.may_draft = True
        """False once a round has shown that layers of a batch cannot go back row by row."""
        self._batch: BatchedLayers | None = None
        self._seen = [0]  # tokens that the batch has seen of each session
        self._in_round = False  # the batch has a round to accept

    @property
    def batchable(self) -> bool:
        """True if layers of this kind can be joined."""
        return batchable(self.sessions[0].sequence.states)

    @property
    def layers(self) -> list[object]:
        """The layers of the next forward."""
        return self.sessions[0].layers if self._batch is None else self._batch.layers

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that each session has seen."""
        return [session.position + seen for session, seen in zip(self.sessions, self._seen, strict=True)]

    @property
    def unseen(self) -> list[list[int]]:
        """The recorded tokens that each session has not seen."""
        return [session.recorded[length:] for session, length in zip(self.sessions, self.lengths, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch, in addition to the sessions' own layers."""
        return 0 if self._batch is None else self._batch.nbytes

    def compute(self, forward: Callable[[mx.array, list[object]], mx.array], tokens: mx.array) -> mx.array:
        """Calls `forward(tokens, layers)` of the model over one more token of each session, [B, 1], or several of one,
        [1, L]. Returns its logits [B, L, V] (lazy)."""
        if self._batch is None:
            session, length = self.sessions[0], tokens.shape[1]
            in_round = length > 1 and session.sequence.markable
            with session.draft_round(length) if in_round else session.forward(length):
                logits = forward(tokens, session.layers)
            if in_round:
                session.accept(length)
            return logits
        logits = forward(tokens, self._batch.layers)
        self._seen = [seen + 1 for seen in self._seen]
        return logits

    def draft(self, forward: Callable[[mx.array, list[object]], mx.array], tokens: mx.array) -> mx.array | None:
        """Calls `forward(tokens, layers)` over tokens [B, L], L > 1: the next token of each session, drafts, and
        padding. Returns the logits [B, L, V] (lazy); `accept` has to follow. Returns None, with all sessions where they
        were, if the rows of a batch cannot go back one by one."""
        if self._batch is None:
            session = self.sessions[0]
            with session.draft_round(tokens.shape[1]):
                return forward(tokens, session.layers)
        with self._batch.draft_round(tokens.shape[1]):
            logits = forward(tokens, self._batch.layers)
        if not self._batch.may_accept:
            self.may_draft = False
            self._batch.accept([0] * len(self.sessions))
            return None
        self._in_round = True
        return logits

    def accept(self, counts: Sequence[int]) -> bool:
        """Ends a round: the first `counts` tokens of each session are right. Returns the result of `Session.accept`,
        or True for several sessions."""
        if self._batch is None:
            return self.sessions[0].accept(counts[0])
        self._in_round = False
        self._batch.accept(counts)
        self._seen = [seen + count for seen, count in zip(self._seen, counts, strict=True)]
        return True

    def take_back(self, length: int) -> None:
        """Ends a round over `length` tokens of each session whose logits are not numbers, and brings all sessions back
        to where they were."""
        self.accept([0] * len(self.sessions))
        if self._batch is not None:
            self._batch.wipe_columns(length)

    def arrays(self) -> list[mx.array]:
        """Returns the arrays of a batch to evaluate together with its logits, which do not depend on them."""
        return [] if self._batch is None else self._batch.arrays()

    def join(self, others: Sequence["DecodeRows"]) -> None:
        """Appends the one session of each of `others`. Waits for the forwards that they have under way. Raises
        RuntimeError if one of them has a round to accept."""
        sessions = [session for each in others for session in each.sessions]
        if self._in_round or any(each.in_round for each in (*self.sessions, *sessions)):
            raise RuntimeError("layers with drafts in them cannot be joined")
        rows = [each.layers for each in sessions]
        if self._batch is None:
            self._batch = BatchedLayers([self.sessions[0].layers, *rows])
        else:
            self._batch.extend(rows)
        self.sessions += sessions
        self._seen += [0] * len(sessions)

    def make_room(self, sessions: int, tokens: int) -> bool:
        """Makes a piece of the room that a batch needs for this many more `sessions`, of at most `tokens` tokens, and
        for the next tokens of all. Returns True once nothing is lacking."""
        return self._batch is None or self._batch.make_room(len(self.sessions) + sessions, tokens)

    def settle(self, row: int) -> None:
        """Lets the session's own layers take over the tokens that its row has seen."""
        count, self._seen[row] = self._seen[row], 0
        if self._batch is not None and count:
            self.sessions[row].absorb(self._batch.caches, row, count)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order. A session that is left alone takes over its row."""
        if len(rows) == 1:
            self.settle(rows[0])
        elif self._batch is not None:
            self._batch.wipe_rows([row for row, session in enumerate(self.sessions) if session.distrusted])
        self.sessions = [self.sessions[row] for row in rows]
        self._seen = [self._seen[row] for row in rows]
        if len(rows) < 2:
            self._batch = None
        elif self._batch is not None:
            self._batch.keep(rows)
