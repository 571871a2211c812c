"""Sessions: the use of layers by each request, alone and in a batch."""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import takewhile

import mlx.core as mx

from runner.cache.checkpoints import Checkpoint, Site
from runner.cache.layer_interface import Match
from runner.cache.layers.batched import BatchedLayers, batchable
from runner.cache.node import Node, keys
from runner.cache.sequence import SequenceLayers, SequenceMark
from runner.cache.sketch import Forward
from runner.cache.trie import PrefixTrie
from runner.logs import Log

log = Log(__name__)
_NOT_READY = "a forward in a session that is closed or failed, or has a round to accept"

_FEW = 16
"""The most tokens of a prompt that may be left to compute after the known first token of its answer was sent. A
repeated prompt never has more left, for any sort of layer."""
CHECK_TOKENS = 64
"""The number of decode steps between two checks of the bytes held. Layers grow by more tokens at a time than this."""


class Session:
    """One request's use of the layers, from `begin` to `close`.

    `total`, `matched` and `cached` are numbers of tokens: of the prompt, of the prefix that it shares with the cache,
    and of the part of this prefix that need not be evaluated again. `remaining` is the rest of the prompt, never empty.
    `recorded` is the prompt and the tokens sampled after it. `layers` is the `cache=` argument of the model's forward.
    During decode the layers are up to one token ahead of `recorded`.

    A *round* is a forward over several tokens of the answer. Perhaps only the first of them are right:

        with session.draft_round(n):            # over the next token and n - 1 drafts after it
            logits = model(tokens, session.layers)
        ...                                     # find out that the first m of these tokens are right
        if not session.accept(m):               # True: the session stands after these m tokens
            ...                                 # False: it stands where the round began; compute the m tokens again

    Until `accept` the position of the session stays as it was before the round. To compute several known tokens once
    more, use a round, too; it may have further drafts after these tokens. Drafts that are right may be recorded before
    or after `accept`.
    """

    def __init__(
        self, sequence: SequenceLayers, prompt: list[int], match: Match, end: Callable[["Session"], None]
    ) -> None:
        """`end(session)` is called by the first `close`."""
        self.sequence = sequence
        self.layers = sequence.layers
        self.total = len(prompt)
        self.matched, self.cached, self.miss = match
        self._end: Callable[[Session], None] | None = end
        self._evicted_bytes = sequence.totals.evicted_bytes
        self.recorded = prompt
        self.first: int | None = None
        """The first token of the answer, if this is known and not recorded yet. The layers may have seen the whole
        prompt then. Before the next forward, record this token or call `forget_first`."""
        self.next_check_at = 0
        """The position from which on a forward over one token calls `_check`, as every longer forward does."""
        self.failed = False
        """True during a forward, and after a forward that raised: the content of the layers may be wrong. The caller
        sets it if an evaluation raised. `close` then keeps nothing of the layers."""
        self.cache_invalid = False
        """True if the cache's own code raised during a forward: the content of the cache may be wrong."""
        self.distrusted = False
        """True if the session has computed NaN or infinity: `close` keeps none of its tokens."""
        self._mark: SequenceMark | None = None  # the mark of the round that has to be accepted
        self._ready = True  # False while in a round, and after `close`

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
        """The bytes that the whole cache has evicted since this session began."""
        return self.sequence.totals.evicted_bytes - self._evicted_bytes

    def state(self) -> list[mx.array]:
        """Returns all arrays of all layers, for an evaluation after a forward."""
        return self.sequence.arrays()

    def next_forward(self, most: int) -> int:
        """Returns the number of tokens for the next prefill forward, at most `most`. Returns 0 once only the last
        recorded token is left, which the first decode step computes. Raises ValueError unless `most` is positive.

        The tokens are those in `recorded` from `position` on. If the session was set back (its layers have seen fewer
        tokens than are recorded), sampled tokens can be among them.
        """
        if most < 1:
            raise ValueError(f"a prefill forward of {most} tokens")
        end = len(self.recorded) - 1
        ahead = self._checkpoints_before(end)
        stop = ahead[0] if ahead and not self.sequence.passes else end
        return max(0, min(most, stop - self.position))

    @contextmanager
    def forward(self, count: int) -> Iterator[None]:
        """Surrounds the call of the model over the next `count` tokens, and no other code that may raise. MLX is lazy:
        the evaluation may be inside the block or after it. If the block raises, the layers may stand at different
        offsets; `close` then keeps nothing of them."""
        if not self._ready or self.failed:
            raise RuntimeError(_NOT_READY)
        self.failed = self.cache_invalid = True
        self.sequence.page_out()
        self.cache_invalid = False
        inside = self._checkpoints_before(self.position + count) if count > 1 else ()
        with self.sequence.passing(count, inside) if inside else nullcontext():
            yield
        self.cache_invalid = True
        self.sequence.count_forward(count)
        if count > 1 or self.sequence.position >= self.next_check_at:
            self._check(count, stepwise=count == 1)
        self.failed = self.cache_invalid = False

    def absorb(self, batch_caches: Sequence[object], row: int, count: int) -> None:
        """Appends the last `count` tokens of a batch's row to the session's layers. `batch_caches` are the batch's
        layers."""
        with self.forward(count):
            self.sequence.absorb(batch_caches, row, count)
            self.sequence.evaluate()  # an unevaluated slice keeps the whole batch alive

    def record(self, token: int) -> None:
        """Records a sampled token, also the one that ends a generation. Call it as soon as the token is known, even if
        the forward over this token was dispatched before."""
        self.recorded.append(token)

    def continuation(self, most: int) -> list[int]:  # noqa: ARG002
        """Returns up to `most` tokens that followed the recorded ones in another conversation, up to an item of
        media."""
        return []

    def forget_first(self) -> None:
        """Forgets the known first token. The layers have not seen the last token of the prompt afterwards."""
        self.first = None

    def forget_first_if_far(self) -> None:
        """Forgets the known first token if more than a few tokens of the prompt are left: the answer would pause after
        its first token until these are computed."""
        if self.first is not None and self.total - self.position > _FEW:
            self.forget_first()

    def close(self) -> None:
        """Ends the session. Call it in a `finally`; a second call does nothing. Rewinds all layers to the last offset
        that is both recorded and seen, and stores the tokens up to there, or fewer if a layer cannot rewind. If the
        session has `failed`, logs this and frees what may be wrong."""
        end, self._end = self._end, None
        if end is None:
            return
        mark = self._mark
        if mark is not None and not self.failed:
            try:
                # Only the first token of the round is certain: the other recorded tokens may differ from the drafts in
                # the layers.
                self.accept(int(len(self.recorded) > mark.position))
            except Exception:
                log.exception("a round could not be taken back")
        self._mark = None
        self._ready = False
        self.failed |= self.distrusted
        end(self)

    def _checkpoints_before(self, end: int) -> list[int]:  # noqa: ARG002
        """Returns the checkpoints after `position` and before the offset `end`, in ascending order."""
        return []

    def _check(self, count: int, *, stepwise: bool) -> None:
        """Called after a forward over several tokens, and when `next_check_at` is reached. `count` tokens were
        computed: one by one if `stepwise`, else in one forward."""

    @property
    def in_round(self) -> bool:
        """True if a round has to be accepted before anything else is computed."""
        return self._mark is not None

    @contextmanager
    def draft_round(self, count: int) -> Iterator[None]:
        """Surrounds the call of the model over the next `count` tokens, as `forward` does; call `accept` afterwards.
        Raises ValueError if `count` is less than 2, and TypeError unless `sequence.markable`."""
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
        """Ends a round whose first `count` tokens are right. Returns True if the session now stands after these tokens,
        as if they had been computed one by one; False if a layer cannot, and the session is back where the round began.
        Raises RuntimeError if there is no round to end, and ValueError if the round has fewer than `count` tokens."""
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
    """A session along a path of the trie. Its prefill passes checkpoints or, if the layers cannot, stops there."""

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
        """The layers stand at the end of `node`. `_check` calls `check(session, count, stepwise)`; `go_back(session,
        to)` takes the session's layers back to `to` tokens."""
        super().__init__(sequence, prompt, match, end)
        self._trie = trie
        self._check_cache = check
        self._go_back = go_back
        self.node = node
        """The last node that the session has reached. The session holds a lock on it."""
        self.checkpoints: list[Checkpoint] = []
        self.detached = False
        """True if the trie was cleared meanwhile: the session keeps its layers, and stores nothing."""
        self._left_at: Node | None = None  # no path of the trie spells the recorded tokens after this node

    def add_checkpoint(self, at: int) -> None:
        """Adds a checkpoint at `at`, where another prompt diverges from this prompt."""
        if all(each.at != at for each in self.checkpoints):
            insort(self.checkpoints, Checkpoint(at, Site.BRANCH))
            self.next_check_at = min(self.next_check_at, at)

    def continuation(self, most: int) -> list[int]:
        if self.detached or self._left_at is self.node or most < 1:
            return []
        ahead = self.recorded[self.node.end :]
        if ahead and ahead[0] not in self.node.children:
            return []  # the most frequent case, and the cheapest
        found = self._trie.continuation(self.node, keys(ahead), most).tolist()
        if ahead and not found:
            self._left_at = self.node  # this does not change again: recorded tokens stay
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

    def _checkpoints_before(self, end: int) -> list[int]:
        return [] if self.detached else [each.at for each in self.checkpoints if self.position < each.at < end]

    def _check(self, count: int, *, stepwise: bool) -> None:
        self._check_cache(self, count, stepwise)
        self.next_check_at = self.position - self.position % CHECK_TOKENS + CHECK_TOKENS
        if self.checkpoints:
            self.next_check_at = min(self.next_check_at, self.checkpoints[0].at)


class DecodeRows:
    """One session over its own layers, or several sessions over a batch: joined copies of the sessions' layers.

    While a session is in a batch, its own layers stand still. When it leaves, its layers take over the tokens that its
    row of the batch has seen, as if in one forward. If a batch fails, its content may be wrong; the sessions' own
    layers are still right, and only behind.
    """

    def __init__(self, session: Session) -> None:
        self.sessions = [session]
        self.may_draft = True
        """False once a round has shown that the rows of a batch cannot go back by different numbers of tokens."""
        self._batch: BatchedLayers | None = None
        self._seen = [0]  # for each session, the tokens that only the batch has seen
        self._in_round = False  # True if the batch has a round to accept

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

    def compute(self, forward: Forward, tokens: mx.array) -> mx.array:
        """Calls the model's `forward(tokens, layers)`. `tokens` are the next token of each session, [B, 1], or several
        tokens of a single session, [1, L]. Returns the logits [B, L, V] (lazy)."""
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

    def draft(self, forward: Forward, tokens: mx.array) -> mx.array | None:
        """Calls `forward(tokens, layers)` over `tokens` [B, L], L > 1: for each session its next token, drafts and
        padding. Returns the logits [B, L, V] (lazy); call `accept` afterwards. Returns None, and leaves all sessions
        where they were, if the rows of a batch cannot go back by different numbers of tokens."""
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
        """Ends a round. `counts` are, for each session, the number of tokens that are right. Returns the result of
        `Session.accept` for one session, and True for several."""
        if self._batch is None:
            return self.sessions[0].accept(counts[0])
        self._in_round = False
        self._batch.accept(counts)
        self._seen = [seen + count for seen, count in zip(self._seen, counts, strict=True)]
        return True

    def take_back(self, length: int) -> None:
        """Ends a round over `length` tokens whose logits have NaN or infinity: all sessions go back to where they
        were."""
        self.accept([0] * len(self.sessions))
        # Compiled steps read whole buffers, and MLX multiplies what their masks hide by 0, which leaves NaN as it is.
        if self._batch is None:
            self.sessions[0].sequence.trim(0)
        else:
            self._batch.wipe_columns(length)

    def arrays(self) -> list[mx.array]:
        """Returns the arrays of a batch on which its logits do not depend. Evaluate them together with the logits."""
        return [] if self._batch is None else self._batch.arrays()

    def join(self, others: Sequence["DecodeRows"]) -> None:
        """Appends the single session of each of `others`. Waits for forwards over their layers. Raises RuntimeError if
        any session has a round to accept."""
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
        """Makes a piece of the room that a batch needs for `sessions` more sessions, with at most `tokens` tokens each,
        and for the next tokens of all sessions. Returns True once there is room for everything."""
        return self._batch is None or self._batch.make_room(len(self.sessions) + sessions, tokens)

    def settle(self, row: int) -> None:
        """Appends the tokens that a row of the batch has seen to the own layers of the row's session."""
        count, self._seen[row] = self._seen[row], 0
        if self._batch is not None and count:
            self.sessions[row].absorb(self._batch.caches, row, count)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order. If one session is left, its layers take over the tokens of its row."""
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
