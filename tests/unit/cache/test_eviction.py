"""The order of eviction, the reasons to keep a node, and the cost of the order.

Trees are written as `tree("12*", "3", ...)`: see there. A node is named by the text of its path.
"""

import random

import pytest

from runner.cache.checkpoints import Site
from runner.cache.eviction import Eviction, EvictionOrder
from runner.cache.layer_interface import Snapshot
from runner.cache.node import Node, keys
from runner.cache.trie import PrefixTrie
from tests.lib.story import rank

STATE = 1
LEAF, WORTH = EvictionOrder(), EvictionOrder((STATE,))
every_order = pytest.mark.parametrize("order", [LEAF, WORTH], ids=["leaf", "worth"])


class Tree:
    """Nodes by the text of their way, a letter a token. They are used one after the other in the order given; each has
    a slice of a byte a token and a state of 100 bytes."""

    def __init__(self, *ways: str, state: int = 100) -> None:
        self.trie = PrefixTrie()
        self.at: dict[str, Node] = {}
        for way in ways:
            self.add(way, state)

    def add(self, way: str, state: int = 100) -> Node:
        *_, node = self.trie.extend(self.trie.root(), keys(map(ord, way)))
        node.slots = [Bytes(len(node.tokens)), Bytes(state, state=True)]
        self.at[way] = node
        self.trie.touch([node])
        return node

    def going(self, order: EvictionOrder, spared: str = "") -> list[str]:
        """All that go, each taken out before the next is asked for."""
        names = {node: way for way, node in self.at.items()}
        gone = []
        for node in Eviction(self.trie, order).victims():
            if node is not self.at.get(spared):
                gone.append(names.get(node, "?"))
                self.give_up(node)
        return gone

    def give_up(self, node: Node) -> None:
        if node.children:
            self.trie.merge(node)
        else:
            self.trie.remove(node)


class Bytes(Snapshot):
    """Some bytes that join anything. A slice adds up, a state does not. Until it gets bytes of its own it is live."""

    def __init__(self, size: int, *, state: bool = False, live: bool = False) -> None:
        self.start, self.stop = 0, size
        self.homeless = not live
        self._state = state

    @property
    def live(self) -> bool:
        return not self.homeless

    @property
    def nbytes(self) -> int:
        return self.stop if self.homeless else 0

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        if self._state:
            return None, self
        upper = min(at, self.stop)  # a merge may have found nothing above
        self.stop -= upper
        return Bytes(upper, live=self.live), self

    def after(self, first: Snapshot | None) -> Snapshot | None:
        self.stop += 0 if first is None or self._state else first.stop
        return self

    def close(self) -> None: ...


@every_order
def test_a_node_in_use_is_never_evicted(order: EvictionOrder) -> None:
    """However old and large it is. The way to it can lose states: it may need more than there is room for."""
    tree = Tree("a", "ab", "abc", "d", "abcd", state=1000)
    tree.trie.lock(tree.at["abc"])
    for node in (tree.at["d"], tree.at["abcd"]):
        tree.trie.touch([node])
    assert tree.going(order) == ["d", "abcd"] if order is LEAF else ["a", "ab", "d", "abcd"]
    assert tree.at["abc"].occupied


@every_order
def test_a_spared_node_is_never_evicted(order: EvictionOrder) -> None:
    """The end of the live conversation: it stays when its children are gone, too. Another time it may go."""
    tree = Tree("a", "ab")
    tree.trie.touch([tree.at["a"]])
    eviction = Eviction(tree.trie, order)
    for node in eviction.victims():
        if node is not tree.at["a"]:
            tree.give_up(node)
    assert list(tree.trie.nodes()) == [tree.at["a"]] == [next(eviction.victims())]


def test_inner_checkpoints_are_evicted_too() -> None:
    """They are merged into their child."""
    tree = Tree("a", "ab", "abc", "d")
    for _ in range(9):
        tree.trie.touch([tree.at["d"]])
    assert tree.going(WORTH) == ["a", "ab", "abc", "d"]


def test_a_checkpoint_that_the_last_request_passed_goes_before_one_that_it_used() -> None:
    tree = Tree("a", "ab", "abc")
    for key in ("a", "ab"):
        tree.at[key].mark(Site.BEFORE)
    tree.trie.learn(tree.at["ab"], Site.BEFORE)
    for _ in range(9):
        tree.trie.touch([tree.at["a"]])
    passed = WORTH.weight(tree.at["a"])
    assert passed > WORTH.weight(tree.at["ab"])
    tree.trie.lock(tree.at["abc"])
    assert WORTH.weight(tree.at["a"]) == passed / 2  # a running request's count twice
    tree.trie.unlock(tree.at["abc"])
    for key in ("abc", "ab"):
        tree.give_up(tree.at[key])
    assert passed > 4 * WORTH.weight(tree.at["a"])  # all requests return to what is left


@pytest.mark.parametrize(("went_on", "first"), [(Site.BEFORE, "abc"), (Site.END, "ab")])
def test_a_point_where_the_conversation_went_on_stays(went_on: Site, first: str) -> None:
    """A chat that drops its thinking goes on before its answer, an agent after it. New nodes have its habits."""
    tree = Tree("ab")
    tree.at["ab"].site = went_on
    for _ in range(20):
        tree.trie.learn(tree.at["ab"], went_on)
    tree.at["ab"].mark(Site.BEFORE)
    tree.add("abc")
    for _ in range(2):
        tree.trie.touch([tree.at["ab"]])
    assert tree.going(WORTH)[0] == first


@pytest.mark.parametrize(("went_on", "gone"), [(Site.BEFORE, ["abc", "d", "ab"]), (Site.END, ["d", "abc", "ab"])])
def test_tokens_that_are_seldom_used_again_go_first(went_on: Site, gone: list[str]) -> None:
    """The answers of a chat that drops its thinking, and then what no request has used yet. An agent's answers stay."""
    tree = Tree("ab", "d")
    tree.at["ab"].site = went_on
    for _ in range(20):
        tree.trie.learn(tree.at["ab"], went_on)
    tree.at["ab"].site = tree.at["d"].site = Site.BEFORE
    tree.add("abc")
    tree.trie.now += 8
    assert tree.trie.split(tree.at["ab"], 1).passed
    assert tree.going(LEAF) == [*gone, "?"]


def test_an_answer_that_was_passed_is_worth_less_than_the_last() -> None:
    tree = Tree("a", "ab")
    passed, last = WORTH.weight(tree.at["a"]), WORTH.weight(tree.at["ab"])
    assert passed > 4 * last


def test_what_frees_nothing_is_not_merged() -> None:
    """A node without a state: its slice would only move into the child."""
    tree = Tree("a", "ab")
    tree.at["a"].slots = [Bytes(1000), None]
    assert tree.going(WORTH, spared="ab") == []
    assert tree.going(WORTH) == ["ab", "a"]


@every_order
@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_that_of_a_fresh_look_at_all_nodes(order: EvictionOrder, seed: int) -> None:
    """Whatever was done to the trie since the last look, and while one node goes after the other."""
    story = Story(order, seed)
    for _ in range(60):
        story.step()
    story.check(gone=99)
    assert all(node.locks for node in story.trie.nodes() if not node.children)


class Story:
    """Random changes to a trie, a few of them between one look and the next."""

    def __init__(self, order: EvictionOrder, seed: int) -> None:
        self.trie = PrefixTrie()
        self.order = order
        self.eviction = Eviction(self.trie, order)
        self.choice = random.Random(seed)
        self.locked: list[Node] = []

    def step(self) -> None:
        choice, nodes = self.choice, list(self.trie.nodes())
        kind = choice.choice(("say", "say", "touch", "lock", "unlock", "learn", "own", "cut", "compact", "look"))
        if kind == "say" or not nodes:
            self.say()
        elif kind == "touch":
            self.trie.touch(self.order.used(choice.choice(nodes)))
        elif kind == "lock" and len(self.locked) < 3:
            self.locked.append(choice.choice(nodes))
            self.trie.lock(self.locked[-1])
        elif kind == "unlock" and self.locked:
            self.trie.unlock(self.locked.pop(choice.randrange(len(self.locked))))
        elif kind == "learn":
            self.trie.learn(choice.choice(nodes), self.choice.choice([*Site]))
        elif kind == "own":
            for snapshot in filter(None, choice.choice(nodes).slots):
                assert isinstance(snapshot, Bytes)
                snapshot.homeless = True
        elif kind == "cut" and (long := [node for node in nodes if len(node.tokens) > 1]):
            self.trie.split(choice.choice(long), 1)
        elif kind == "compact":
            self.trie.merge_needless(*choice.choice(nodes).path()[1:-1])
        elif kind == "look":
            self.check(gone=choice.randrange(3), spared=choice.choice([None, *nodes]))

    def say(self) -> None:
        """Nodes on the way get what they lack, live or not, while they are locked."""
        way = keys(self.choice.choices(range(3), k=self.choice.randint(1, 8)))
        passed = self.trie.extend(self.trie.root(self.choice.choice("ab")), way)
        self.trie.lock(passed[-1])
        for node in passed:
            if not any(node.slots):
                live = self.choice.random() < 0.5
                state = Bytes(self.choice.choice((0, 100, 1000)), state=True, live=live)
                node.slots = [Bytes(len(node.tokens), live=live), state]
        self.trie.touch(self.order.used(passed[-1]))
        self.trie.unlock(passed[-1])

    def check(self, gone: int, spared: Node | None = None) -> None:
        """The next ones to go, which go."""
        victims = (node for node in self.eviction.victims() if node is not spared)
        for _ in range(gone):
            ranks = [
                rank(self.order, node, self.trie.now)
                for node in self.trie.nodes()
                if node is not spared and not node.occupied and self.order.evictable(node)
            ]
            victim = next(victims, None)
            assert [rank(self.order, victim, self.trie.now)] == [min(ranks)] if victim else not ranks
            if victim is None:
                return
            if victim.children:
                self.trie.merge(victim)
            else:
                self.trie.remove(victim)


@every_order
def test_removed_nodes_are_not_in_the_order(order: EvictionOrder) -> None:
    """The trie forgets the changes that it reported, too: nothing piles up turn after turn."""
    trie = PrefixTrie()
    eviction = Eviction(trie, order)
    node = trie.root()
    for turn in range(50):
        (node,) = trie.extend(node, keys([turn]))
        node.slots = [Bytes(1), Bytes(10, state=True)]
        trie.touch(order.used(node))
        trie.merge_needless(*node.path()[1:-1])
        eviction.refresh()
    assert list(trie.nodes()) == [node]
    assert set(eviction._places) == {node}
    assert [place[-1] for line in eviction._lines.values() for place in line] == [node]
    assert not eviction._with_live
    assert not trie.changed
