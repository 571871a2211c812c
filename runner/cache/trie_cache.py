"""The trie cache: many conversations, their common prefixes stored once, each resumed exactly where it can be.

One stack of layers runs; the conversation that ran last stays in it, and the nodes of the trie on its path are views
into its buffers. When another conversation needs the buffers, what would be lost is copied out (page out), and what the
other one has stored moves in (page in): every token's bytes are in one place at any time.

Invariants between sessions: the layers stand at the end of `_end`; what is live in them lies on the path to it, or
behind it and not yet overwritten; the ledger counts exactly the snapshots in the trie.
"""

from collections.abc import Callable

from runner.cache import landing
from runner.cache.eviction import Eviction, LeastRecentLeaf, LeastWorth
from runner.cache.interface import Match, Miss
from runner.cache.points import Points, RestorePoints
from runner.cache.session import LiveSession, OneSessionCache
from runner.cache.stack import LayerStack
from runner.cache.trie import Node, PrefixTrie, keys, spelled
from runner.cache.trie_session import TrieSession
from runner.logs import Log

log = Log(__name__)
_CHECK_TOKENS = 64  # how often a decode looks at the bytes held; layers grow by more than that at a time


class TrieCache(OneSessionCache):
    """A trie of conversations over one stack of layers."""

    def __init__(
        self,
        make_layers: Callable[[], list[object]],
        budget_bytes: int | None = None,
        points: Points | None = None,
    ) -> None:
        """`budget_bytes` bounds everything held between requests, live or paged out; None does not bound it."""
        super().__init__(make_layers)
        self._budget = budget_bytes
        self._points = points or RestorePoints()
        self._said: set[str] = set()
        self._state_bytes = 0  # of all layers with a state, the most that was seen
        self._trie = PrefixTrie()
        self._stack = LayerStack(make_layers())
        self._distrusted = 0
        self._end: Node | None = None

    @property
    def nbytes(self) -> int:
        return self._stack.nbytes + self._stack.ledger.nbytes

    def _forget(self) -> None:
        # Taken apart: nodes and live snapshots hold each other, and would wait for Python's collector.
        self._trie.clear()
        self._stack.abandon()
        self._stack = LayerStack(self._make_layers(), self._stack.distrusted)
        self._end = None

    # --- a session begins

    def _start(self, prompt: list[int], salt: str) -> TrieSession:
        try:
            session = self._open_session(prompt, self._trie.root(salt))
            self._evict()
        except Exception:
            log.exception("cache freed: a conversation could not be resumed")
        else:
            return session
        self._forget()  # not before the error and what it holds are gone
        return self._open_session(prompt, self._trie.root(salt))

    def _open_session(self, prompt: list[int], root: Node) -> TrieSession:
        tokens = keys(prompt)
        path, matched = self._trie.match(root, tokens)
        # One token is always evaluated again: the first logits come from it.
        branch = min(matched, len(prompt) - 1)
        if path[-1].start == branch < matched:
            path.pop()
        miss = Miss.NONE if matched else self._why_nothing(root)
        node, refusal = self._land(path, branch)
        match = Match(matched, node.end, miss or refusal)
        session = TrieSession(self._stack, prompt, match, node, self._passed, self._close)
        self._trie.lock(node)
        self._end = None
        if not self._stack.sliceable:
            session.points = self._points.plan(prompt, node.end, branch, self._most_points())
            if session.points and session.points[0].at == node.end:
                node.restore_point |= session.points.pop(0).keep
        return session

    def _why_nothing(self, root: Node) -> Miss:
        if root.children:
            return Miss.NO_COMMON_PREFIX
        return Miss.SALT if next(self._trie.nodes(), None) else Miss.EMPTY

    def _land(self, path: list[Node], matched: int) -> tuple[Node, Miss]:
        """Takes the layers as far along the path as they get, at most `matched` tokens; returns where they stand and
        why no further."""
        common = self._common(path, matched)
        at, refusal = landing.find(self._stack, path, matched, common)
        path = self._cut(path, at)
        landing.go(self._stack, path, at, common)
        node = next(node for node in path if node.end == at)
        landing.fill(self._stack, node)
        self._trie.touch(self._eviction.used(node))
        return node, refusal

    def _cut(self, path: list[Node], at: int) -> list[Node]:
        """The path with a node that ends there, if it did not have one."""
        last = path[-1]
        return [*path[:-1], self._trie.split(last, at - last.start)] if last.start < at < last.end else path

    def _common(self, path: list[Node], matched: int) -> int:
        """How many of the matched tokens the layers hold already."""
        live = set(self._end.path()) if self._end else set()
        shared = [node.end for node in path if node in live]
        return min(max(shared, default=0), matched)

    def _most_points(self) -> int | None:
        """How many restore points one prompt may leave, so that their states take a quarter of the budget at most.
        Windows cost no more than their tokens, wherever they are cut."""
        one = self._state_bytes
        return max(1, self._budget // 4 // one) if self._budget and one else None

    # --- while it runs

    def _passed(self, session: TrieSession, count: int) -> None:
        self._heed_distrust()
        self._keep_points(session)
        if count > 1 or self._stack.position % _CHECK_TOKENS == 0:
            # Further than needed: looking at all nodes again after each few tokens would hold up a decode.
            self._evict(spare=(self._budget or 0) // 32)

    def _heed_distrust(self) -> None:
        """What was kept of a layer whose clock turned out to be another one is good for nothing."""
        if len(self._stack.distrusted) == self._distrusted:
            return
        self._distrusted = len(self._stack.distrusted)
        for node in self._trie.nodes():
            for slot in self._stack.distrusted:
                if slot < len(node.slots) and (held := node.slots[slot]) is not None:
                    held.close()
                    node.slots[slot] = None

    def _keep_points(self, session: TrieSession) -> None:
        position = self._stack.position
        while session.points and session.points[0].at <= position:
            point = session.points.pop(0)
            if point.at == position:
                self._follow(session, position)
                session.node.restore_point |= point.keep

    def _follow(self, session: TrieSession, to: int) -> None:
        """Takes the trie along the tokens up to `to`, where the layers stand, and keeps what they hold."""
        node = session.node
        for passed in self._trie.advance(node, keys(session.recorded[node.end : to])):
            landing.fill(self._stack, passed)
            node = passed
        self._use(session, node)
        self._trie.touch(self._eviction.used(node))

    def _use(self, session: TrieSession, node: Node) -> None:
        """The session has got to this node."""
        self._trie.lock(node)
        self._trie.unlock(session.node)
        session.node = node

    # --- it ends

    def _keep(self, session: LiveSession, failed: bool) -> None:
        assert isinstance(session, TrieSession)
        try:
            if session.torn:
                log.warning("cache freed", why="it could not follow a request")
                self._forget()  # a node may have been left half cut, half joined or half copied
            elif failed:
                log.warning("what was live in the cache is freed", why="a forward failed")
                self._trie.unlock(session.node)
                self._trie.drop_live()
                self._stack.reset()
                self._evict()
            else:
                self._record(session)
        except Exception:
            log.exception("cache freed: a conversation could not be kept")
            self._forget()

    def _record(self, session: TrieSession) -> None:
        stack = session.stack
        reached = min(stack.offset, len(session.recorded))
        if stack.level(reached):
            # Ahead of the record by a token that was never read, in a layer that cannot go back.
            node, _ = self._back(session.node)
            self._use(session, node)
            reached = node.end
        stack.settle()
        states = sum(state.nbytes for _, state in stack.used if state.whole)
        self._state_bytes = max(self._state_bytes, states)
        self._follow(session, reached)
        self._trie.unlock(session.node)
        self._end = session.node
        self._trie.compact(self._end)
        self._thin(self._end)
        self._evict()

    def _back(self, node: Node) -> tuple[Node, Miss]:
        """Lands anew on the way to `node`, which the layers have gone beyond."""
        self._end = node
        return self._land(node.path(), node.end)

    def _thin(self, end: Node) -> None:
        """Restore points that are not worth their bytes any more become part of what follows."""
        points = {node.end: node for node in end.path() if node.restore_point}
        for at in self._points.surplus(list(points), end.end):
            node = points[at]
            node.restore_point = False
            child = node.only_child()
            if child is not None and child.locks == node.locks:
                self._trie.merge(node)

    # --- bytes

    @property
    def _eviction(self) -> Eviction:
        slots = [slot for slot, state in self._stack.used if not state.sliceable]
        return LeastWorth(slots) if slots else LeastRecentLeaf()

    def _evict(self, spare: int = 0) -> None:
        """Makes what is held fit the budget, but for what a running session uses; if it does not fit, with so many
        bytes to spare."""
        if self._budget is None or self.nbytes <= self._budget:
            return
        if self._end is not None and self._stack.nbytes > self._budget:
            self._stack.trim(0)
            if self._stack.nbytes > self._budget:
                self._shorten(self._end, self._budget)
        for victim in self._eviction.victims(node for node in self._trie.nodes() if node is not self._end):
            if self.nbytes <= self._budget - spare:
                return
            if victim.children:
                self._trie.merge(victim)
            else:
                self._trie.remove(victim)
        if self._end is not None:
            landing.lend(self._stack, self._end)
        if self.nbytes > self._budget:
            self._say_once("a running request needs more than --cache-memory")

    def _shorten(self, end: Node, budget: int) -> None:
        """The last conversation alone is too large: keeps as much of its beginning as fits, and nothing else."""
        self._say_once("a conversation is larger than --cache-memory: only its beginning is kept")
        path, matched = self._trie.match(end.path()[0], spelled(end.path())[: self._stack.fitting(budget)])
        common = self._common(path, matched)
        at, _ = landing.find(self._stack, path, matched, common)
        path = self._cut(path, at)
        for node in reversed(list(self._trie.nodes())):
            if node.parent is not None and (node.end > at or node not in path):
                self._trie.remove(node)
        landing.go(self._stack, path, at, common)
        self._stack.trim(0)
        self._end = next(node for node in path if node.end == at)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning(what, held_bytes=self.nbytes, budget_bytes=self._budget or 0)
