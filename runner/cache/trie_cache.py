"""The trie cache: keeps many conversations, stores common prefixes once, and resumes each at the last possible token.

Every open session runs on layers of its own; the trie's nodes on the session's path are views into the buffers of these
layers. Between sessions the conversation that ran last keeps its layers. Earlier conversations keep theirs, too, up to
the largest number of sessions that were open together. When another conversation needs such buffers, the cache copies
out the snapshots that would be overwritten (page out), and moves stored snapshots in (page in). If sessions never run
together, the bytes of each token exist once. Sequences that exist together each hold a copy of their prefix.

Invariants: the invariants in `sequences.py`; and the ledger counts exactly the snapshots in the trie.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

from runner.cache import resume
from runner.cache.checkpoints import CheckpointPolicy, Site
from runner.cache.eviction import BudgetEnforcer
from runner.cache.layer_interface import Match, Miss, Snapshot
from runner.cache.node import Node, Tokens, common_prefix, keys
from runner.cache.sequence import SequenceLayers
from runner.cache.sequences import LiveSequences
from runner.cache.session import CHECK_TOKENS, Session, TrieSession
from runner.cache.sketch import LayerFacts
from runner.cache.trie import PrefixTrie
from runner.logs import Log

log = Log(__name__)
_WORTH_WAITING = 32  # tokens: a request does not wait for another session in order to share fewer
_PIECE = 4096  # tokens: a conversation of sliceable layers loses this many at a time
_ROOM = 256  # tokens: the length of an answer that is assumed before it is computed


class TrieCache:
    """Serves many conversations from one trie, each session over layers of its own."""

    concurrent = True

    def __init__(
        self, facts: LayerFacts, budget_bytes: int | None = None, policy: CheckpointPolicy | None = None
    ) -> None:
        """`budget_bytes` limits everything that open sessions do not need; None means no limit."""
        self.policy = policy or CheckpointPolicy()
        self.trie = PrefixTrie()
        self.sequences = LiveSequences(facts, self.trie)
        self.enforcer = BudgetEnforcer(self.trie, self.sequences)
        self._most_bytes = budget_bytes
        self._has_computed = False
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0

    @property
    def nbytes(self) -> int:
        return self.sequences.nbytes + self.reserved_bytes

    @property
    def paged_bytes(self) -> int:
        return self.sequences.totals.ledger.nbytes

    def detach(self) -> None:
        """Frees everything except the layers of open sessions. These sessions continue without the trie."""
        # Nodes and live snapshots refer to each other: without this, only Python's garbage collector would free them.
        self.trie.clear()
        self.sequences.detach_sessions()
        self.enforcer.reset()

    @contextmanager
    def _freed_on_error(self, what: str) -> Iterator[None]:
        """Surrounds a change of the cache. If the change raises, logs the error and does not pass it on, forgets the
        sessions that the change has opened, and frees the cache."""
        sessions = list(self.sequences.sessions)
        try:
            yield
        except Exception:
            log.exception(f"cache freed: {what}")
            self.sequences.sessions = sessions
            self.detach()

    def begin(self, tokens: Sequence[int], salt: str = "", first: int | None = None) -> TrieSession:
        if not tokens:
            raise ValueError("a session needs a prompt of at least one token")
        session = self._open(list(tokens), salt, first)
        session.forget_first_if_far()
        return session

    def follows(self, tokens: Sequence[int], salt: str = "") -> bool:
        with self._freed_on_error("the prefix that two requests share could not be stored"):
            return self._follows(list(tokens), self.trie.root(salt))
        return False

    def _follows(self, prompt: list[int], root: Node) -> bool:
        for session in self.sequences.sharing:
            if session.node.path()[0] is not root:
                continue
            # Only tokens that the session's own layers have seen can be shared. These layers stand still during a
            # batch.
            reach = max(session.position, session.total - 1)
            ahead = min(common_prefix(prompt, session.recorded), len(prompt) - 1, reach)
            if ahead < self.trie.match(root, keys(prompt))[1] + _WORTH_WAITING:
                continue
            if session.position < ahead:
                session.add_checkpoint(ahead)
                return True
            if session.sequence.sliceable and session.node.end < ahead:
                self.advance_to(session, ahead)
        return False

    def _open(self, prompt: list[int], salt: str, first: int | None) -> TrieSession:
        with self._freed_on_error("a conversation could not be resumed"):
            session = self._resume(prompt, salt, first)
            self.enforce_budget()
            return session
        return self._resume(prompt, salt)

    def _resume(self, prompt: list[int], salt: str, first: int | None = None) -> TrieSession:
        root = self.trie.root(salt)
        wanted = prompt if first is None or not self.sequences.kept.sliceable else [*prompt, first]
        path, matched, branch = self._match(root, keys(wanted))
        sequence, end = self.sequences.acquire(path, branch)
        miss = Miss.NONE
        if not matched:
            elsewhere = any(each.children for each in self.trie.roots.values())
            miss = Miss.NO_COMMON_PREFIX if root.children else Miss.SALT if elsewhere else Miss.EMPTY
        node, refusal = self._restore(sequence, end, path, branch)
        last = len(prompt) - 1
        miss = miss or (refusal if node.end < last else Miss.NONE)
        match = Match(min(matched, len(prompt)), min(node.end, last), miss)
        session = TrieSession(sequence, prompt, match, node, self.trie, self._after_forward, self._go_back, self._close)
        session.first = first
        self.trie.lock(node)
        left = node.site if sequence.sliceable else self.policy.left(prompt, branch, node.end, node.site)
        self.trie.learn(node, left)
        if not sequence.sliceable:
            facts, most = self.sequences.facts, self.budget_bytes
            points = facts.most_checkpoints(most, last - node.end)
            planned = self.policy.plan(prompt, node.end, branch, points, facts.most_tokens(most))
            # Of a conversation that outgrows the budget only the beginning is kept.
            kept_bytes = inf if most is None else most - facts.point_bytes
            session.checkpoints = [each for each in planned if facts.token_bytes * each.at <= kept_bytes]
            if session.checkpoints and session.checkpoints[0].at == node.end:
                node.checkpoint = True
                session.checkpoints.pop(0)
        self.sequences.sessions.append(session)
        return session

    def _match(self, root: Node, tokens: Tokens) -> tuple[list[Node], int, int]:
        """Returns the path along a prompt, the number of matched tokens, and the number of these not to compute."""
        path, matched = self.trie.match(root, tokens)
        # The last token is always evaluated again: the first logits come from it.
        branch = min(matched, len(tokens) - 1)
        if path[-1].start == branch < matched:
            path.pop()
        return path, matched, branch

    def reusable_tokens(self, tokens: Tokens, salt: str) -> int:
        """Returns the number of tokens of a prompt that the cache would supply to `begin` now. Changes nothing."""
        path, _, branch = self._match(self.trie.root(salt), tokens)
        sequence, end = self.sequences.choose(path, branch)
        shared = resume.shared_tokens(path, branch, end)
        return resume.deepest_offset(sequence or self.sequences.fresh(), path, branch, shared)[0]

    def _restore(self, sequence: SequenceLayers, end: Node | None, path: list[Node], matched: int) -> tuple[Node, Miss]:
        """Brings the layers from `end` along the path to the largest possible offset, at most `matched`. Returns the
        node where the layers then stand, and the reason if that is less than `matched`."""
        common = resume.shared_tokens(path, matched, end)
        at, refusal = resume.deepest_offset(sequence, path, matched, common)
        path = self.trie.cut(path, at)
        self.sequences.flush()
        resume.restore_to(sequence, path, at, common)
        node = next(node for node in path if node.end == at)
        resume.store_snapshots(sequence, node)
        self.enforcer.touch(node)
        return node, refusal

    def _after_forward(self, session: TrieSession, count: int, stepwise: bool) -> None:
        if session.detached:
            return
        self._has_computed = True
        position, former = session.position, session.node
        while session.checkpoints and session.checkpoints[0].at <= position:
            checkpoint = session.checkpoints.pop(0)
            if session.sequence.holds(checkpoint.at):
                self.advance_to(session, checkpoint.at)
                session.node.mark(checkpoint.site)
            elif not stepwise:
                self.sequences.facts.passes = False  # so the next forwards stop at their checkpoints
        if not stepwise:
            session.sequence.measure()
        # Else a step that has passed a multiple of CHECK_TOKENS.
        if not stepwise or session.node is not former or position % CHECK_TOKENS < count:
            self._enforce_with_spare()

    def advance_to(self, session: TrieSession, to: int) -> None:
        """Extends the trie along the session's tokens up to the offset `to`, and stores snapshots of the session's
        layers. Moves the session's lock to the node there."""
        passed = self.trie.extend(session.node, keys(session.recorded[session.node.end : to]))
        for node in passed:
            resume.store_snapshots(session.sequence, node)
        self.sequences.flush()
        self._move_to(session, passed[-1] if passed else session.node)
        self.enforcer.touch(session.node)

    def _go_back(self, session: TrieSession, to: int) -> None:
        """Takes the layers of a session back to `to` tokens. Only for layers that can go back to any token."""
        ahead = session.node
        path, at = self.trie.match(ahead.path()[0], keys(session.recorded[:to]))
        node, _ = self._restore(session.sequence, ahead, path, at)
        self._move_to(session, node)
        self.trie.merge_needless(ahead)  # this node was made only because the layers stood there
        self.sequences.flush()

    def _move_to(self, session: TrieSession, node: Node) -> None:
        """Moves the session's lock to `node`."""
        self.trie.lock(node)
        self.trie.unlock(session.node)
        session.node = node

    def _close(self, session: Session) -> None:
        assert isinstance(session, TrieSession)
        self.sequences.sessions.remove(session)
        if not session.detached:
            self._release(session)
        elif session.cache_invalid:
            self.detach()  # the facts of the layers may have changed after the kept ones were made
        if session.sequence is not self.sequences.kept:
            session.sequence.discard()  # after a failure, the layers and their live snapshots are a cycle

    def _release(self, session: TrieSession) -> None:
        with self._freed_on_error("a conversation could not be kept"):
            if session.cache_invalid:
                log.warning("cache freed", why="it could not follow a request")
                self.detach()  # a node may be half split, half joined or half copied
            elif session.failed:
                log.warning("live entries of the cache are freed", why="a forward failed")
                self.trie.unlock(session.node)
                lost = self.sequences.hand_over_shared(session.sequence)
                self.trie.drop(lost | _copies(session) if session.distrusted else lost)
                session.sequence.reset()
                self.enforce_budget()
            else:
                self._store(session)

    def _store(self, session: TrieSession) -> None:
        sequence = session.sequence
        reached = min(sequence.offset, len(session.recorded))
        if sequence.rewind(reached):
            # The layers are ahead of the record by a token that was never read, and one layer cannot rewind.
            node, _ = self._restore(sequence, session.node, session.node.path(), session.node.end)
            self._move_to(session, node)
            reached = node.end
        sequence.evaluate()
        sequence.measure()
        self.advance_to(session, reached)
        end = session.node
        self.trie.unlock(end)
        self.sequences.release(sequence, end)
        self.trie.merge_needless(*end.path()[1:-1])
        if sequence.sliceable:
            self._divide(end, session.total)
        self.sequences.flush()
        self.enforce_budget()

    def _divide(self, end: Node, answer: int) -> None:
        """Splits the path to `end` into pieces to evict, and at `answer`, where the answer begins. Copies nothing while
        the path is live."""
        self.trie.cut([each for each in end.path() if each.start < answer], answer)
        for node in end.path()[1:]:
            node.site = Site.END if node.start >= answer else Site.BEFORE
            for at in range(node.start - node.start % _PIECE + _PIECE, node.end, _PIECE):
                self.trie.split(node, at - node.start).checkpoint = True

    def session_bytes(self, tokens: int) -> int:
        return self.sequences.facts.bytes_of(tokens)

    def admits(self, tokens: int) -> bool:
        # The cache's first session runs alone until its first forward has ended, which shows the memory that computing
        # takes.
        beside = self._has_computed and self.allows(self.session_bytes(tokens + _ROOM))
        return self.budget_bytes is None or not self.sequences.sessions or beside

    def allows(self, nbytes: int) -> bool:
        used = sum(max(each.sequence.nbytes, self.session_bytes(each.total)) for each in self.sequences.sessions)
        return self.budget_bytes is None or used + self.reserved_bytes + nbytes <= self.budget_bytes

    def reserve(self, nbytes: int) -> None:
        self.reserved_bytes = nbytes
        self._enforce_safely()

    def bound(self, nbytes: int) -> int:
        self.budget_bytes = nbytes if self._most_bytes is None else min(nbytes, self._most_bytes)
        self._enforce_safely()
        return nbytes - self.budget_bytes

    def evict(self) -> None:
        if not self.sequences.sessions:
            self.sequences.totals.count_eviction(self.nbytes)
            self.detach()
            return
        budget, self.budget_bytes = self.budget_bytes, 0
        self._enforce_safely()
        self.budget_bytes = budget

    def _enforce_safely(self) -> None:
        """Enforces the budget. An error in it is logged and frees the cache, but fails no request."""
        with self._freed_on_error("unused entries could not be evicted"):
            self._enforce_with_spare()

    def _enforce_with_spare(self) -> None:
        """Enforces the budget. If anything is freed, frees more than needed, so that a decode does not evict something
        every few tokens."""
        self.enforce_budget(spare=(self.budget_bytes or 0) // 128)

    def enforce_budget(self, spare: int = 0) -> None:
        """Evicts entries until the rest fits the budget. If anything has to be evicted, frees `spare` bytes more."""
        self.enforcer.enforce(self.budget_bytes, self.reserved_bytes, spare)


def _copies(session: TrieSession) -> set[Snapshot]:
    """Returns the snapshots that own their bytes, of tokens that only this session has computed."""
    computed = [node for node in session.node.path() if node.end > session.cached and not node.locks]
    return {held for node in computed for held in node.slots if held is not None and not held.live}
