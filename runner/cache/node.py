"""The nodes of the prefix trie, and lists of tokens."""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from runner.cache.layer_interface import Snapshot

Tokens: TypeAlias = "array[int]"
AnyTokens = TypeVar("AnyTokens", list[int], "array[int]")
_BLOCK = 2048


def keys(tokens: Iterable[int]) -> Tokens:
    """Returns token ids as the trie stores them: four bytes each."""
    return array("i", tokens)


def common_prefix(a: AnyTokens, b: AnyTokens) -> int:
    """Returns how many tokens `a` and `b` share from the start.

    Compares slices, which the interpreter does at about 10 ns a token: blocks from the front, then halves of the first
    block that differs.
    """
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
    """An edge, its snapshots and its children."""

    __slots__ = ("checkpoint", "children", "end", "locks", "parent", "restored", "slots", "stored", "tokens", "used")

    def __init__(self, tokens: Tokens, parent: "Node | None") -> None:
        self.tokens = tokens
        self.parent = parent
        self.end: int = len(tokens) + (parent.end if parent else 0)
        self.children: dict[int, Node] = {}
        self.slots: list[Snapshot | None] = []
        """Empty, or one entry for each layer."""
        self.stored = 0
        """The number of its first tokens that are on disk."""
        self.restored = False
        """True if some of it came from the disk."""
        self.checkpoint = False
        """True for a place to return to: the node is kept even if nothing branches off."""
        self.used = 0
        """The tick of the trie's clock at its last use."""
        self.locks = 0

    @property
    def start(self) -> int:
        """Tokens from the root to the beginning of the edge."""
        return self.end - len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that its snapshots own."""
        return sum(snapshot.nbytes for snapshot in self.slots if snapshot is not None)

    def path(self) -> "list[Node]":
        """Returns the nodes from the root to this one, both included."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def only_child(self) -> "Node | None":
        """Returns the child if there is exactly one."""
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
