"""The nodes of the prefix trie, and lists of tokens."""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from runner.cache.checkpoints import PRIOR, Habits, Site
from runner.cache.layer_interface import Snapshot

Tokens: TypeAlias = "array[int]"
AnyTokens = TypeVar("AnyTokens", list[int], "array[int]")
_BLOCK = 2048


def keys(tokens: Iterable[int]) -> Tokens:
    """Returns the token ids in the form that the trie stores: four bytes each."""
    return array("i", tokens)


def common_prefix(a: AnyTokens, b: AnyTokens) -> int:
    """Returns the number of tokens at the start that `a` and `b` have in common. Compares slices, since the interpreter
    needs only about 10 ns for a token of a slice: first blocks from the front, then halves of the first block that
    differs."""
    end = min(len(a), len(b))
    low = 0
    while low < end and a[low : low + _BLOCK] == b[low : low + _BLOCK]:
        low += _BLOCK
    high = min(low + _BLOCK, end)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return min(low, end)


class Node:
    """A node of the trie: an edge (the tokens after the parent's end), the snapshots of these tokens, and the
    children."""

    __slots__ = (
        *("checkpoint", "children", "end", "habits", "locks", "parent", "passed"),
        *("site", "restored", "slots", "stored", "tokens", "used"),
    )

    def __init__(self, tokens: Tokens, parent: "Node | None") -> None:
        self.tokens = tokens
        self.parent = parent
        self.end: int = len(tokens) + (parent.end if parent else 0)
        self.children: dict[int, Node] = {}
        self.slots: list[Snapshot | None] = []
        """The snapshots of the edge, one entry for each layer; an empty list if there are none."""
        self.stored = 0
        """The number of tokens, from the start of the edge, that are on disk."""
        self.restored = False
        """True if some tokens of the edge came from the disk."""
        self.checkpoint = False
        """True if layers may return to the end of this node: the node stays even if it has only one child."""
        self.site = Site.END
        """The site of the node's end in the prompt that made the node. For sliceable layers, END: the last answer."""
        self.habits: Habits = parent.habits if parent else PRIOR
        """The habits of the conversations that pass through the node."""
        self.passed: bool | None = None
        """True if the last request through the node went on below it, False if it went on at the node's end, None if
        there was no such request."""
        self.used = 0
        """The tick of the trie's clock at the last use of the node."""
        self.locks = 0

    @property
    def start(self) -> int:
        """The number of tokens from the root to the beginning of the edge."""
        return self.end - len(self.tokens)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the snapshots of the node own."""
        return sum(snapshot.nbytes for snapshot in self.slots if snapshot is not None)

    @property
    def occupied(self) -> bool:
        """True if a lock is on the node itself, not on a node below it: layers in use stand at its end."""
        return bool(self.locks) and self.locks > sum(child.locks for child in self.children.values())

    def path(self) -> "list[Node]":
        """Returns the nodes from the root to this one, both included."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def mark(self, site: Site) -> None:
        """Notes the site of the node's end, where layers may return."""
        self.site = site
        self.checkpoint = True

    def only_child(self) -> "Node | None":
        """Returns the child if there is exactly one, otherwise None."""
        return next(iter(self.children.values())) if len(self.children) == 1 else None

    def clear(self) -> None:
        """Closes all snapshots of the node."""
        for snapshot in self.slots:
            if snapshot is not None:
                snapshot.close()
        self.slots = []

    def __repr__(self) -> str:
        return f"<{self.start}..{self.end}{' *' if self.checkpoint else ''}>"


def spelled(path: Sequence[Node]) -> Tokens:
    """Returns the tokens along a path from a root."""
    whole = keys(())
    for node in path:
        whole.extend(node.tokens)
    return whole
