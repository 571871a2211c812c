"""Cached answers: the beginning of a greedy answer that need not be computed, because the trie holds its tokens.

A *known choice* is a token of the trie that was the most probable one after exactly its prefix. `CachedAnswers` marks
every recorded token of greedy answers. Where the trie goes on with such tokens after the prompt of a later one, its
session has them in `known`. Layers that can go back to any token are *ahead* then: restored up to the last but one of
them, though nothing is recorded after the prompt. `end_known` takes them back to what was recorded. Other layers stand
where a plain session would begin, and read the known tokens like a prompt.
"""

from collections.abc import Sequence
from itertools import takewhile

from runner.cache.interface import Greedy
from runner.cache.node import Node, keys
from runner.cache.session import TrieSession
from runner.cache.trie import PrefixTrie
from runner.cache.trie_cache import TrieCache


def mark(end: Node, start: int) -> None:
    """Marks the tokens after the first `start` on the path to `end` as known choices."""
    node: Node | None = end
    while node is not None and node.end > start:
        before = node.known.ljust(len(node.tokens), b"\0")[: max(0, start - node.start)]
        node.known = before.ljust(len(node.tokens), b"\1")
        node = node.parent


def known_choices(trie: PrefixTrie, root: Node, tokens: Sequence[int], most: int) -> list[int]:
    """Returns up to `most` known choices in a row after these tokens.

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


class CachedAnswers(TrieCache):
    """A trie cache that knows choices."""

    def begin(
        self, tokens: Sequence[int], salt: str = "", known: Sequence[int] = (), greedy: Greedy | None = None
    ) -> TrieSession:
        choices: list[int] = []
        if greedy is not None and tokens:
            choices = known_choices(self.trie, self.trie.root(salt), tokens, greedy.most)
            choices = [*takewhile(lambda token: token not in greedy.ends, choices)]
        session = self._open([*tokens], salt, choices) if choices else super().begin(tokens, salt, known)
        session.greedy = greedy is not None
        return session

    def _store(self, session: TrieSession) -> None:
        if session.node.end > len(session.recorded):
            self._go_back(session, len(session.recorded))
        super()._store(session)

    def advance_to(self, session: TrieSession, to: int) -> None:
        super().advance_to(session, to)
        if session.greedy:
            mark(session.node, session.total)
