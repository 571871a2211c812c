"""A compressed prefix trie over token ids: the computed prompts, and the snapshots of their pieces.

A node has an edge with the tokens [start, end), and one slot per layer for the snapshot of these tokens. The trie asks
snapshots for their size, and splits, joins and closes them; it knows nothing else of them. A child is found by the
first token of its edge, so the edges of siblings begin with different tokens.

Locking a node locks its path to the root. A locked node is not removed. It is merged into its child only if all its
locks are the child's, too.

The rules are those of Ollama's trie at HEAD (August 2026), with two exceptions: counted locks replace Ollama's single
active path, and an edge never grows in place.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import zip_longest

from runner.cache.checkpoints import Site, learned
from runner.cache.layer_interface import Snapshot
from runner.cache.node import Node, Tokens, common_prefix, keys


class PrefixTrie:
    """The nodes of all salts. Each salt has a root of its own. A root has no tokens and no snapshots."""

    def __init__(self) -> None:
        self.roots: dict[str, Node] = {}
        self.now = 0
        """The tick of the latest use of any node."""
        self.changed: set[Node] = set()
        """The nodes, roots included, that were made, removed, touched or unlocked, or that got another edge, other
        children or other habits, since this set was emptied. Changes of slots are not noted: slots change only in
        locked nodes and where a snapshot is live."""

    def root(self, salt: str = "") -> Node:
        """Returns the root of all prompts with this salt. If it is new, drops roots without children and locks."""
        if salt not in self.roots:
            self.roots = {name: root for name, root in self.roots.items() if root.children or root.locks}
            self.roots[salt] = Node(keys(()), None)
        return self.roots[salt]

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes except the roots, each parent before its children."""
        waiting = [child for root in self.roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def match(self, start: Node, tokens: Tokens) -> tuple[list[Node], int]:
        """Returns the longest path from `start` whose edges after `start` spell the beginning of `tokens`, and the
        number of tokens that match. Perhaps only a part of the last node matches."""
        path, children, at, end = [start], start.children, 0, len(tokens)
        while at < end and (child := children.get(tokens[at])) is not None:
            path.append(child)
            edge = child.tokens
            ahead = tokens[at : at + len(edge)]
            if ahead != edge:
                return path, at + common_prefix(ahead, edge)
            at, children = at + len(edge), child.children
        return path, at

    def continuation(self, start: Node, tokens: Tokens, most: int) -> Tokens:
        """Returns up to `most` tokens that follow `tokens` on a path down from the end of `start`. The result is empty
        if no path spells `tokens`. At a fork, follows the child that was used last."""
        path, matched = self.match(start, tokens)
        if matched < len(tokens):
            return keys(())
        node = path[-1]
        found = node.tokens[start.end + matched - node.start :][:most] if node is not start else keys(())
        while node.children and len(found) < most:
            node = max(node.children.values(), key=lambda child: child.used)
            found += node.tokens[: most - len(found)]
        return found

    def extend(self, node: Node, tokens: Tokens) -> list[Node]:
        """Adds a path with `tokens` below the end of `node`. Returns the nodes of the path, without `node`; the last of
        them ends with the last token. New nodes do not count as used: the caller touches and fills them."""
        path, matched = self.match(node, tokens)
        passed, reached = path[1:], node.end + matched
        if passed and passed[-1].end > reached:
            passed[-1] = self.split(passed[-1], reached - passed[-1].start)
        if matched < len(tokens):
            passed.append(self._append(passed[-1] if passed else node, tokens[matched:]))
        return passed

    def split(self, node: Node, at: int) -> Node:
        """Splits a node after its first `at` tokens and returns the new upper node. `node` becomes the lower node: its
        end, its children and its checkpoint mark stay. Raises ValueError unless 0 < at < the length of the edge."""
        if node.parent is None or not 0 < at < len(node.tokens):
            raise ValueError(f"cannot cut {node!r} after {at} of its tokens")
        upper = Node(node.tokens[:at], node.parent)
        upper.used, upper.locks = node.used, node.locks
        upper.restored, upper.site = node.restored, node.site
        upper.passed = None if node.passed is None else True
        upper.stored, node.stored = min(node.stored, at), max(0, node.stored - at)
        halves = [held.split(upper.end) if held is not None else (None, None) for held in node.slots]
        upper.slots, node.slots = [first for first, _ in halves], [second for _, second in halves]
        node.parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self.changed.update((upper, node))
        return upper

    def cut(self, path: list[Node], at: int) -> list[Node]:
        """Returns the path up to a node that ends at `at`, an offset in the last node. Splits that node if needed."""
        last = path[-1]
        return [*path[:-1], self.split(last, at - last.start)] if last.start < at < last.end else path

    def merge(self, node: Node) -> Node:
        """Joins `node` with its only child and returns the child. The end, the children and the checkpoint mark of the
        child stay; its last use is the later of the two. Raises ValueError for a root, for a node without exactly one
        child, and for an occupied node."""
        child = node.only_child()
        if node.parent is None or child is None or node.occupied:
            raise ValueError(f"cannot merge {node!r} into a child")
        child.slots = [_joined(first, second) for first, second in zip_longest(node.slots, child.slots)]
        child.restored |= node.restored
        child.stored = node.stored + (child.stored if node.stored == len(node.tokens) else 0)
        child.tokens = node.tokens + child.tokens
        child.used = max(node.used, child.used)
        child.parent = node.parent
        node.parent.children[child.tokens[0]] = child
        _unlink(node)
        self.changed.update((node, child))
        return child

    def merge_needless(self, *nodes: Node) -> None:
        """Merges each node with exactly one child into the child, unless it is a checkpoint or occupied."""
        for node in nodes:
            if len(node.children) == 1 and not (node.checkpoint or node.occupied):
                self.merge(node)

    def remove(self, node: Node) -> None:
        """Removes a leaf, closes its snapshots, and then removes its unlocked ancestors without snapshots and without
        other children. Raises ValueError for a root, an inner node and a locked node."""
        parent = node.parent
        if parent is None or node.children or node.locks:
            raise ValueError(f"cannot remove {node!r}")
        node.clear()
        del parent.children[node.tokens[0]]
        _unlink(node)
        self.changed.update((node, parent))
        if parent.parent is not None and not (parent.children or parent.locks or any(parent.slots)):
            self.remove(parent)

    def clear(self) -> None:
        """Takes the trie apart, even after an error, and frees its memory immediately."""
        for node in list(self.nodes()):
            for held in node.slots:
                with suppress(RuntimeError):  # a split or merge that failed half-way has closed some of them
                    if held is not None:
                        held.close()
            _unlink(node)
        self.roots.clear()
        self.changed.clear()

    def drop(self, lost: Collection[Snapshot]) -> None:
        """Closes the snapshots in `lost`. Then removes unlocked leaves without snapshots."""
        nodes = list(self.nodes())
        for node in nodes:
            for slot, held in enumerate(node.slots):
                if held is not None and held in lost:
                    held.close()
                    node.slots[slot] = None
        for node in nodes:
            if node.parent is not None and not (node.children or node.locks or any(node.slots)):
                self.remove(node)

    def lock(self, node: Node) -> None:
        """Adds a lock to `node` and to every node above it."""
        for each in node.path():
            each.locks += 1
            self.changed.add(each)

    def unlock(self, node: Node) -> None:
        """Removes a lock from `node` and from every node above it. Raises ValueError if `node` has no lock."""
        if not node.locks:
            raise ValueError(f"{node!r} is not locked")
        for each in node.path():
            each.locks -= 1
            self.changed.add(each)

    def touch(self, nodes: Iterable[Node]) -> None:
        """Sets the last use of these nodes to a new tick."""
        self.now += 1
        for node in nodes:
            node.used = self.now
            self.changed.add(node)

    def learn(self, node: Node, site: Site) -> None:
        """Notes along the path to `node`, where the layers of a request stand, that the request left the known tokens
        at `site`. Does nothing at a root."""
        for each in node.path() if node.parent is not None else ():
            each.habits, each.passed = learned(each.habits, site), each is not node
            self.changed.add(each)

    def _append(self, parent: Node, tokens: Tokens) -> Node:
        if not tokens or tokens[0] in parent.children:
            raise ValueError(f"{parent!r} has a child with this first token, or there is none")
        node = Node(tokens, parent)
        parent.children[tokens[0]] = node
        self.changed.update((parent, node))
        return node


def _joined(first: Snapshot | None, second: Snapshot | None) -> Snapshot | None:
    if second is not None:
        return second.after(first)
    if first is not None:
        first.close()
    return None


def _unlink(node: Node) -> None:
    node.parent, node.children, node.slots = None, {}, []
