"""The nodes of the prefix trie."""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from runner.cache.layer_interface import Snapshot

Tokens: TypeAlias = "array[int]"


def keys(tokens: Iterable[int]) -> Tokens:
    """Returns token ids as the trie stores them: four bytes each."""
    return array("i", tokens)


class Node:
    """An edge, its snapshots and its children.

    `slots` is empty or has one entry per layer. A `checkpoint` is a node made to return to: it is kept even if nothing
    branches off. `used` is the tick of the trie's clock at its last use. The first `stored` tokens of the edge are on
    disk; some of it was `restored` from there. `known` has a 1 for each token that is a known choice
    (`known_choices.py`); those behind its end are none.
    """

    __slots__ = (
        "checkpoint",
        "children",
        "end",
        "known",
        "locks",
        "parent",
        "restored",
        "slots",
        "stored",
        "tokens",
        "used",
    )

    def __init__(self, tokens: Tokens, parent: "Node | None") -> None:
        self.tokens = tokens
        self.known = b""
        self.parent = parent
        self.end: int = len(tokens) + (parent.end if parent else 0)
        self.children: dict[int, Node] = {}
        self.slots: list[Snapshot | None] = []
        self.checkpoint = self.restored = False
        self.used = self.locks = self.stored = 0

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
