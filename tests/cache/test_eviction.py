"""Who goes first when memory is short, what keeps a node, and what the order costs.

Trees are written as `tree("12*", "3", ...)`: see there. Nodes are known by the text of their way.

Mutations of runner/cache/eviction.py, each of which the test named beside it notices:

    the youngest first, the shallowest, the smallest    test_the_oldest_goes_first, test_ties_*
    locks do not count                                  test_what_is_used_never_goes
    nodes with two children may go                      test_where_conversations_part_stays
    inner nodes may go when all layers are sliceable    test_slices_are_given_up_from_the_leaves
    a use counts for the node only / for the way        test_a_use_keeps_the_way_alive_or_only_the_point
    a parent is not thought of after its child went     test_slices_are_given_up_from_the_leaves
    a child is not ranked anew after a merge, or its    test_victims_come_one_after_the_other_as_if_asked_each_time
        old rank believed
    nodes that were not offered                         test_what_was_not_offered_never_goes
    worth: without bytes, without tokens, without age   test_worth_*
    worth: slices count for a merge, or nothing counts  test_what_frees_nothing_is_not_merged
    all nodes are ranked again for every victim         test_many_victims_cost_one_look_at_all_nodes
"""

import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from runner.cache.eviction import Eviction, LeastRecentLeaf, LeastRecentPoint, LeastWorth
from runner.cache.interface import Snapshot
from runner.cache.trie import Node, PrefixTrie, keys

SLICE, STATE = 0, 1
POLICIES: dict[str, Eviction] = {
    "leaf": LeastRecentLeaf(),
    "point": LeastRecentPoint(),
    "worth": LeastWorth((STATE,)),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Tree:
    """Nodes by the text of their way, a letter a token. They are used one after the other in the order given; each has
    a slice of a byte a token and a state of 100 bytes."""

    def __init__(self, *ways: str, state: int = 100) -> None:
        self.trie = PrefixTrie()
        self.at: dict[str, Node] = {}
        for way in ways:
            *_, node = self.trie.advance(self.trie.root(), keys(map(ord, way)))
            node.slots = [Bytes(len(node.tokens)), Bytes(state, state=True)]
            self.at[way] = node
            self.trie.touch([node])

    def order(self, policy: Eviction, without: str = "") -> list[str]:
        """All that go, each taken out before the next is asked for."""
        names = {node: way for way, node in self.at.items()}
        nodes = [node for node in self.trie.nodes() if names.get(node) != without]
        gone = []
        for node in policy.victims(nodes):
            gone.append(names.get(node, "?"))
            self.give_up(node)
        return gone

    def first(self, policy: Eviction) -> str | None:
        victim = policy.victim(self.trie.nodes())
        return next((way for way, node in self.at.items() if node is victim), None)

    def give_up(self, node: Node) -> None:
        if node.children:
            self.trie.merge(node)
        else:
            self.trie.remove(node)


class Bytes(Snapshot):
    """Some bytes that join anything. A slice adds up, a state does not."""

    def __init__(self, size: int, *, state: bool = False) -> None:
        self.start, self.stop = 0, size
        self._state = state

    @property
    def live(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self.stop

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        return None, self

    def after(self, first: Snapshot | None) -> Snapshot | None:
        self.stop += 0 if first is None or self._state else first.stop
        return self

    def close(self) -> None: ...


@every_policy
def test_the_oldest_goes_first(policy: Eviction) -> None:
    assert Tree("a", "b", "c").order(policy) == ["a", "b", "c"]


@every_policy
def test_nothing_goes_from_an_empty_trie(policy: Eviction) -> None:
    assert policy.victim(()) is None


@every_policy
def test_what_is_used_never_goes(policy: Eviction) -> None:
    """Neither it nor the way to it, however old and large."""
    tree = Tree("a", "ab", "abc", "d", "abcd", state=1000)
    tree.trie.lock(tree.at["abc"])
    for node in (tree.at["d"], tree.at["abcd"]):
        tree.trie.touch([node])
    assert tree.order(policy) == ["d", "abcd"]


@every_policy
def test_what_was_not_offered_never_goes(policy: Eviction) -> None:
    """The end of the live conversation is left out by the cache; it stays when its children are gone, too."""
    tree = Tree("a", "ab")
    tree.trie.touch([tree.at["a"]])
    assert tree.order(policy, without="a") == ["ab"]


def test_slices_are_given_up_from_the_leaves() -> None:
    """An inner node frees nothing by being merged, so it has to wait until it is a leaf."""
    tree = Tree("a", "ab", "abc", "d")
    assert tree.order(POLICIES["leaf"]) == ["abc", "ab", "a", "d"]


def test_points_go_by_their_own_age() -> None:
    """Inner ones too: they are merged into their child."""
    tree = Tree("a", "ab", "abc", "d")
    assert tree.order(POLICIES["point"]) == ["a", "ab", "abc", "d"]


@every_policy
def test_where_conversations_part_stays(policy: Eviction) -> None:
    """Until one of them is gone."""
    tree = Tree("a", "ab", "ac")
    tree.trie.touch([tree.at["ac"]])
    gone = tree.order(policy)
    assert gone[0] == "ab"
    assert sorted(gone) == ["a", "ab", "ac"]


@every_policy
def test_ties_go_to_the_deepest(policy: Eviction) -> None:
    tree = Tree("a", "bcd", "ef", state=0)
    for node in tree.at.values():
        node.slots = [Bytes(10), None] if policy is not POLICIES["worth"] else [None, None]
    tree.trie.touch(tree.at.values())
    assert tree.order(policy) == ["bcd", "ef", "a"]


def test_ties_at_one_depth_go_to_the_largest() -> None:
    tree = Tree("a", "b", "c")
    tree.at["b"].slots[SLICE] = Bytes(50)
    tree.trie.touch(tree.at.values())
    assert tree.first(POLICIES["point"]) == "b"


def test_a_use_keeps_the_way_alive_or_only_the_point() -> None:
    """67: all are aged, then one branch goes on. Where leaves go first the way to it is refreshed with it; where points
    age by themselves only the point that was used."""
    for policy, kept in (
        (POLICIES["leaf"], ["a", "ab", "abc"]),
        (POLICIES["point"], ["abc"]),
        (POLICIES["worth"], ["abc"]),
    ):
        tree = Tree("a", "ab", "abc", "abd", "e")
        tree.trie.touch(tree.at.values())
        aged = tree.at["e"].used
        tree.trie.touch(policy.used(tree.at["abc"]))
        assert [way for way, node in tree.at.items() if node.used > aged] == kept


def test_no_node_is_older_than_what_hangs_below_it_when_uses_count_for_the_way() -> None:
    policy = POLICIES["leaf"]
    tree, choice = Tree("a", "ab", "abc", "abd", "ae"), random.Random(3)
    for _ in range(30):
        tree.trie.touch(policy.used(choice.choice(list(tree.at.values()))))
    assert all(node.parent is None or node.parent.used >= node.used for way, node in tree.at.items() if len(way) > 1)


# --- worth


def test_worth_is_the_tokens_that_it_takes_to_have_it_again() -> None:
    """As old, and larger: what follows a long stretch is kept all the same."""
    tree = Tree("a" * 300, "b")
    tree.trie.touch(tree.at.values())
    assert tree.at["a" * 300].nbytes > tree.at["b"].nbytes
    assert tree.order(POLICIES["worth"]) == ["b", "a" * 300]


def test_worth_falls_with_age() -> None:
    """Idle for long enough, the long stretch goes before what was used just now."""
    tree = Tree("a" * 300, "b")
    for _ in range(20):
        tree.trie.touch([tree.at["b"]])
    assert tree.first(POLICIES["worth"]) == "a" * 300


def test_worth_is_less_the_more_bytes_it_frees() -> None:
    tree = Tree("a", "b")
    tree.at["b"].slots[STATE] = Bytes(1000, state=True)
    tree.trie.touch(tree.at.values())
    assert tree.first(POLICIES["worth"]) == "b"


def test_what_frees_nothing_is_not_merged() -> None:
    """A node without a state: its slice would only move into the child."""
    tree = Tree("a", "ab")
    tree.at["a"].slots = [Bytes(1000), None]
    assert tree.order(POLICIES["worth"], without="ab") == []
    assert tree.order(POLICIES["worth"]) == ["ab", "a"]


# --- many at once


@every_policy
@pytest.mark.parametrize("seed", range(20))
def test_victims_come_one_after_the_other_as_if_asked_each_time(policy: Eviction, seed: int) -> None:
    """Merging and removing change who may go, and how soon; a fresh look at all nodes would say the same."""
    assert _taken_out(policy, seed, at_once=True) == _taken_out(policy, seed, at_once=False)


def _taken_out(policy: Eviction, seed: int, *, at_once: bool) -> list[tuple[int, int, int]]:
    tree, locked = _random_tree(seed)
    now = max(node.used for node in tree.trie.nodes())
    gone = []
    for node in policy.victims(tree.trie.nodes()) if at_once else _asked_each_time(policy, tree, now):
        gone.append((node.start, node.end, node.used))
        tree.give_up(node)
    assert {node for node in tree.trie.nodes() if node.locks} == set(locked)
    return gone


def _asked_each_time(policy: Eviction, tree: Tree, now: int) -> Iterator[Node]:
    while some := [node for node in tree.trie.nodes() if policy._may_go(node)]:
        yield min(some, key=lambda node: policy._rank(node, now))


def _random_tree(seed: int) -> tuple[Tree, list[Node]]:
    choice = random.Random(seed)
    ways = ["".join(choice.choices("abc", k=choice.randint(1, 8))) for _ in range(25)]
    tree = Tree(*sorted(set(ways), key=len))
    nodes = list(tree.trie.nodes())
    for node in choice.choices(nodes, k=40):
        tree.trie.touch([node])
    used = choice.choice(nodes)
    tree.trie.lock(used)
    return tree, used.path()[1:]


@every_policy
def test_many_victims_cost_one_look_at_all_nodes(policy: Eviction) -> None:
    """Half of 10,000 nodes go: each is ranked a few times, not once for every victim."""
    trie = PrefixTrie()
    for number in range(5000):
        node = trie.root()
        for part in ([number, 1], [2, 3]):
            (node,) = trie.advance(node, keys(part))
            node.slots = [Bytes(2), Bytes(10, state=True)]
            trie.touch(policy.used(node))
    ranked = 0
    rank = policy._rank

    def counted(node: Node, now: int) -> tuple[float, ...]:
        nonlocal ranked
        ranked += 1
        return rank(node, now)

    with patch.object(policy, "_rank", counted):
        for gone, node in enumerate(policy.victims(trie.nodes()), 1):
            if node.children:
                trie.merge(node)
            else:
                trie.remove(node)
            if gone == 5000:
                break
    assert sum(1 for _ in trie.nodes()) == 5000
    assert ranked <= 3 * 10_000
