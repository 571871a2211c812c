"""Known choices: the tokens of the trie that were the most probable ones behind exactly their prefix.

`GreedyTrieCache` marks every recorded token of the answers that it begins with `begin_greedy`. Where the trie goes on
with such tokens behind the prompt of a later one, its session has them in `known`. Layers that can go back to any token
are *ahead* then: restored up to the last but one of them, though nothing is recorded behind the prompt. `end_known`
takes them back to what was recorded. Other layers stand where a plain session would begin, and read the known tokens
like a prompt.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile

from runner.cache.node import Node, keys
from runner.cache.trie import PrefixTrie
from runner.cache.trie_cache import TrieCache
from runner.cache.trie_session import TrieSession


def mark(end: Node, start: int) -> None:
    """Marks the tokens behind the first `start` on the path to `end` as known choices."""
    node: Node | None = end
    while node is not None and node.end > start:
        before = node.known.ljust(len(node.tokens), b"\0")[: max(0, start - node.start)]
        node.known = before.ljust(len(node.tokens), b"\1")
        node = node.parent


def known_choices(trie: PrefixTrie, root: Node, tokens: Sequence[int], most: int) -> list[int]:
    """Returns up to `most` known choices in a row behind these tokens.

    Where rounding has once decided for one token and once for another one, nothing is known.
    """
    path, matched = trie.match(root, keys(tokens))
    node, at, found = path[-1], matched - path[-1].start, keys(())
    if matched < len(tokens):
        return []
    while len(found) < most:
        stop = node.known.find(b"\0", at)
        stop = len(node.known) if stop < 0 else stop
        found += node.tokens[at:stop]
        marked = [child for child in node.children.values() if child.known[:1] == b"\1"]
        if max(at, stop) < len(node.tokens) or len(marked) != 1:
            break
        node, at = marked[0], 0
    return found[: max(0, most)].tolist()


class GreedyTrieCache(TrieCache):
    """A trie cache that knows choices."""

    def begin_greedy(self, tokens: Sequence[int], most: int, ends: Collection[int], salt: str = "") -> TrieSession:
        if not tokens:
            raise ValueError("a session needs a prompt of at least one token")
        choices = known_choices(self.trie, self.trie.root(salt), tokens, most)
        session = self._open([*tokens], salt, [*takewhile(lambda token: token not in ends, choices)])
        session.greedy, session.go_back = True, self._go_back
        return session

    def _go_back(self, session: TrieSession, to: int) -> None:
        """Takes the layers of a session, which can go back to any token, to `to`, which is on its path."""
        ahead = session.node
        path, at = self.trie.match(ahead.path()[0], keys(session.recorded[:to]))
        node, _ = self._restore(session.sequence, ahead, path, at)
        self._move_to(session, node)
        child = ahead.only_child()
        if child is not None and not ahead.checkpoint and ahead.locks == child.locks:
            self.trie.merge(ahead)  # it was made to stand there
            self.sequences.flush()

    def _store(self, session: TrieSession) -> None:
        if session.node.end > len(session.recorded):
            self._go_back(session, len(session.recorded))
        super()._store(session)

    def advance_to(self, session: TrieSession, to: int) -> None:
        super().advance_to(session, to)
        if session.greedy:
            mark(session.node, session.total)
