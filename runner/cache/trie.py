"""A compressed prefix trie over token ids: which prompts were computed, and where their pieces are.

A node's edge carries tokens [start, end) and one slot per layer for what was kept of them. Nothing here knows what a
snapshot is made of: it has a size, and can be cut, joined and closed. Children are found by the first token of their
edge, so two siblings never share one.

Whoever uses a node locks it, which locks the way to the root with it; locked nodes are neither removed nor merged away.

The rules are those of Ollama's trie at HEAD (August 2026), except that counted locks take the place of its one active
path, and that an edge never grows in place.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from runner.cache.layer_interface import Snapshot
from runner.cache.prefix import common_prefix

Tokens: TypeAlias = "array[int]"


def keys(tokens: Iterable[int]) -> Tokens:
    """Token ids as the trie stores them: four bytes each."""
    return array("i", tokens)


class Node:
    """An edge and what hangs below it.

    `slots` is empty or has one entry per layer. `checkpoint` marks a node that was made to be come back to: it is
    not merged away just because nothing branches off. `used` is the tick of the trie's clock when it was last useful.
    """

    __slots__ = ("checkpoint", "children", "end", "locks", "parent", "slots", "tokens", "used")

    def __init__(self, tokens: Tokens, parent: "Node | None") -> None:
        self.tokens = tokens
        self.parent = parent
        self.end: int = len(tokens) + (parent.end if parent else 0)
        self.children: dict[int, Node] = {}
        self.slots: list[Snapshot | None] = []
        self.checkpoint = False
        self.used = 0
        self.locks = 0

    @property
    def start(self) -> int:
        """Tokens from the root to where the edge begins."""
        return self.end - len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that its snapshots own."""
        return sum(snapshot.nbytes for snapshot in self.slots if snapshot is not None)

    def path(self) -> "list[Node]":
        """From the root to here, both included."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def only_child(self) -> "Node | None":
        """The child, if there is exactly one."""
        return next(iter(self.children.values())) if len(self.children) == 1 else None

    def clear(self) -> None:
        """Closes all its snapshots."""
        for snapshot in self.slots:
            if snapshot is not None:
                snapshot.close()
        self.slots = []

    def __repr__(self) -> str:
        return f"<{self.start}..{self.end}{' *' if self.checkpoint else ''}>"


class Found(NamedTuple):
    """The way along which tokens were found, its first node included, and how many of them. The last node may be
    matched in part only."""

    path: list[Node]
    matched: int


class PrefixTrie:
    """The nodes of all salts. One root per salt, which never holds anything itself."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self.now = 0
        """The time of the last use of any node."""
        self.changed: set[Node] = set()
        """Nodes that were made, taken away, touched or unlocked, or whose edge or children are others, since someone
        emptied this; roots too. What is put into their slots or closed there shows only in that they are locked
        meanwhile, or that something is live in them."""

    def root(self, salt: str = "") -> Node:
        """The root under which prompts of this salt are found, and no others. It is gone, when another one is asked
        for, if nothing hangs below it and nobody has locked it."""
        if salt not in self._roots:
            self._roots = {name: root for name, root in self._roots.items() if root.children or root.locks}
            self._roots[salt] = Node(keys(()), None)
        return self._roots[salt]

    @property
    def empty(self) -> bool:
        """Whether there is nothing but roots."""
        return not any(root.children for root in self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before their children."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def match(self, start: Node, tokens: Tokens) -> Found:
        """The longest way down from the end of `start` that spells the first of these tokens."""
        path, children, at, end = [start], start.children, 0, len(tokens)
        while at < end and (child := children.get(tokens[at])) is not None:
            path.append(child)
            edge = child.tokens
            ahead = tokens[at : at + len(edge)]
            if ahead != edge:
                return Found(path, at + common_prefix(ahead, edge))
            at, children = at + len(edge), child.children
        return Found(path, at)

    def advance(self, node: Node, tokens: Tokens) -> list[Node]:
        """Goes on from the end of `node` along these tokens, making what is not there.

        Returns the nodes gone through, `node` left out; the last one ends with the last token. None of them is in use
        for having been made: touch and fill them.
        """
        path, matched = self.match(node, tokens)
        passed, reached = path[1:], node.end + matched
        if passed and passed[-1].end > reached:
            passed[-1] = self.split(passed[-1], reached - passed[-1].start)
        if matched < len(tokens):
            passed.append(self._append(passed[-1] if passed else node, tokens[matched:]))
        return passed

    def split(self, node: Node, at: int) -> Node:
        """Cuts the edge after its first `at` tokens; returns the new upper node. `node` stays the lower one, and keeps
        its end, its children and its being a restore point. Raises ValueError unless 0 < at < the edge's length."""
        if node.parent is None or not 0 < at < len(node.tokens):
            raise ValueError(f"cannot cut {node!r} after {at} of its tokens")
        upper = Node(node.tokens[:at], node.parent)
        upper.used, upper.locks = node.used, node.locks
        halves = [held.split(upper.end) if held is not None else (None, None) for held in node.slots]
        upper.slots, node.slots = [first for first, _ in halves], [second for _, second in halves]
        node.parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self.changed.update((upper, node))
        return upper

    def cut(self, path: list[Node], at: int) -> list[Node]:
        """The path with a node that ends at `at`, which lies on it, if it did not have one."""
        last = path[-1]
        return [*path[:-1], self.split(last, at - last.start)] if last.start < at < last.end else path

    def merge(self, node: Node) -> Node:
        """Joins `node` with its only child, which is returned: it keeps its end, its children and its being a restore
        point, and is as lately used as the later of the two. Raises ValueError if there is not exactly one child, for a
        root, and while someone uses `node` itself."""
        child = node.only_child()
        if node.parent is None or child is None or node.locks != child.locks:
            raise ValueError(f"cannot merge {node!r} into a child")
        slots = max(len(node.slots), len(child.slots))
        above, below = _padded(node.slots, slots), _padded(child.slots, slots)
        child.slots = [_joined(first, second) for first, second in zip(above, below, strict=True)]
        child.tokens = node.tokens + child.tokens
        child.used = max(node.used, child.used)
        child.parent = node.parent
        node.parent.children[child.tokens[0]] = child
        _unlink(node)
        self.changed.update((node, child))
        return child

    def compact(self, end: Node) -> None:
        """Merges away what lies on the path to `end` for no reason: nodes with one child that are no restore points,
        and that nobody uses."""
        for node in end.path()[1:-1]:
            child = node.only_child()
            if child is not None and not node.checkpoint and node.locks == child.locks:
                self.merge(node)

    def remove(self, node: Node) -> None:
        """Removes a leaf and closes its snapshots; with it goes what above it neither holds nor leads to anything then.
        Raises ValueError for a root, an inner node and a locked one."""
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
        """Takes everything apart, so that its memory is free at once, whatever state it is in."""
        for node in list(self.nodes()):
            for held in node.slots:
                with suppress(RuntimeError):  # a split or a merge that failed half-way has closed some
                    if held is not None:
                        held.close()
            _unlink(node)
        self._roots.clear()
        self.changed.clear()

    def drop(self, lost: Collection[Snapshot]) -> None:
        """Closes these snapshots, and removes the nodes of which nothing is left then, unless someone uses them."""
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
        """Someone uses `node`, and with it the way to the root."""
        for each in node.path():
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Ends one use. Raises ValueError if there is none."""
        if not node.locks:
            raise ValueError(f"{node!r} is not locked")
        for each in node.path():
            each.locks -= 1
            if not each.locks:
                self.changed.add(each)

    def touch(self, nodes: Iterable[Node]) -> None:
        """These were useful just now."""
        self.now += 1
        for node in nodes:
            node.used = self.now
            self.changed.add(node)

    def _append(self, parent: Node, tokens: Tokens) -> Node:
        if not tokens or tokens[0] in parent.children:
            raise ValueError(f"{parent!r} has a child with this first token, or there is none")
        node = Node(tokens, parent)
        parent.children[tokens[0]] = node
        self.changed.update((parent, node))
        return node


def spelled(path: Sequence[Node]) -> Tokens:
    """The tokens along a path from a root."""
    whole = keys(())
    for node in path:
        whole.extend(node.tokens)
    return whole


def _joined(first: Snapshot | None, second: Snapshot | None) -> Snapshot | None:
    if second is not None:
        return second.after(first)
    if first is not None:
        first.close()
    return None


def _padded(slots: list[Snapshot | None], count: int) -> list[Snapshot | None]:
    return slots + [None] * (count - len(slots))


def _unlink(node: Node) -> None:
    node.parent, node.children, node.slots = None, {}, []
