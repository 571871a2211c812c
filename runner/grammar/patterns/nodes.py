"""The parts of a regular expression, called nodes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from runner.grammar.patterns.charsets import EVERY, Spans, union


@dataclass(frozen=True, slots=True)
class Chars:
    """One character in `within` that is in `spans` or has one of `properties`; if `negated`, one that is not."""

    spans: Spans
    properties: tuple[str, ...] = ()
    negated: bool = False
    folded: bool = False
    """True if upper and lower case count as equal."""
    within: Spans = EVERY
    edges: bool = False
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Seq:
    """The nodes `items`, one after the other."""

    items: "tuple[Node, ...]"
    edges: bool = False
    empty: bool = True


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the nodes `options`."""

    options: "tuple[Node, ...]"
    edges: bool
    empty: bool


@dataclass(frozen=True, slots=True)
class Repeat:
    """The node `item`, at least `least` times and at most `most` times; None for `most` means any number of times."""

    item: "Node"
    least: int
    most: int | None
    edges: bool
    empty: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """A place in a text, of the kind `^`, `$`, `b` or `B`, or a look (`=`, `!`, `<=` or `<!`) for one of `spans`."""

    kind: str
    multiline: bool = False
    spans: Spans = ()
    edges: bool = True
    empty: bool = True


@dataclass(frozen=True, slots=True)
class Look:
    """A place in a text with `item` after it or, if `behind`, before it; if `negative`, a place without it."""

    item: "Node"
    behind: bool
    negative: bool
    edges: bool = True
    empty: bool = True

    @property
    def kind(self) -> str:
        """The kind of an `Edge` with the same direction and sign."""
        return "<" * self.behind + ("!" if self.negative else "=")


@dataclass(frozen=True, slots=True)
class Back:
    """A reference to a group: the text that the group has matched."""

    group: int | str
    edges: bool = True
    empty: bool = True


Node = Chars | Seq | Alt | Repeat | Edge | Look | Back
"""A part of a pattern. `edges`: it contains an Edge, a Look or a Back. `empty`: it may match the empty text."""
NOTHING = Seq(())
NEVER = Chars(())


def seq(items: Iterable[Node]) -> Node:
    """Returns the simplest node for the sequence of `items`."""
    flat: list[Node] = []
    for item in items:
        flat += item.items if isinstance(item, Seq) else (item,)
    if len(flat) == 1:
        return flat[0]
    if NEVER in flat and not any(item.edges for item in flat):
        return NEVER
    return Seq(tuple(flat), any(item.edges for item in flat), all(item.empty for item in flat))


def alt(options: Iterable[Node]) -> Node:
    """Returns the simplest node for a choice between `options`, without those that never match."""
    flat: dict[Node, None] = {}
    spans: list[tuple[int, int]] = []
    for option in options:
        for each in option.options if isinstance(option, Alt) else (option,):
            if is_plain(each):
                spans += each.spans
            else:
                flat[each] = None
    if spans:
        flat[Chars(union(spans))] = None
    if len(flat) < 2:
        return next(iter(flat), NEVER)
    return Alt(tuple(flat), any(option.edges for option in flat), any(option.empty for option in flat))


def repeat(item: Node, least: int, most: int | None) -> Node:
    """Returns the simplest node for `item`, at least `least` and at most `most` times (None: any number)."""
    if most == 0 or item == NOTHING or (item == NEVER and not least):
        return NOTHING
    if (least, most) == (1, 1):
        return item
    if isinstance(item, Edge | Look):
        return item if least else NOTHING
    return Repeat(item, least, most, item.edges, item.empty or not least)


def beginnings(items: Sequence[Node]) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Yields each of `items` with which a text of the sequence `items` may begin, and the items after it."""
    for at, item in enumerate(items):
        yield item, items[at + 1 :]
        if not item.empty:
            return


def is_plain(node: Node) -> TypeGuard[Chars]:
    """Returns True for `Chars` that have nothing but `spans`."""
    return isinstance(node, Chars) and node == Chars(node.spans)


def within(node: Node) -> Iterator[Node]:
    """Yields the node and all nodes inside it."""
    waiting = [node]
    while waiting:
        yield (part := waiting.pop())
        match part:
            case Seq(inner) | Alt(inner):
                waiting += inner
            case Repeat(item) | Look(item):
                waiting.append(item)
