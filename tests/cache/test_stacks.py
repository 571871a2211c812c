"""Who has which layers: a stack for each open session, and one that is kept between them. Over fake layers.

The life of stacks within requests is told in `test_trie_together`; here each verb is looked at by itself.

Guards, the mutation each is there for, and the test that kills it:

* one at a time         take() gives the kept stack while it is used    test_the_kept_stack_is_taken_once
* where it stands       take() leaves `end`                             test_the_kept_stack_is_taken_once
* given up              keep() leaves the former one as it is           test_who_is_kept_takes_the_place_of_the_former
* not who runs          keep() gives up a stack in use                  test_a_former_one_in_use_is_left_alone
* shared by all         a stack that is given up takes all with it      test_what_others_hold_is_live_there
* never of the root     adopt() of the root                             test_what_others_hold_is_live_there
* not those adrift      only_in() of all sessions                       test_whoever_is_adrift_takes_over_nothing
* counted once          nbytes of the kept stack and of its session     test_bytes_are_those_of_every_stack_once
* anew                  renew() keeps the stack, or its end             test_renewing_lets_go_of_all_but_who_runs
* one layout            renew() with another layout                     test_renewing_lets_go_of_all_but_who_runs
"""

from collections.abc import Sequence

import pytest

from runner.cache import resume
from runner.cache.interface import Match
from runner.cache.sequence import LayerStack
from runner.cache.sequences import Stacks
from runner.cache.trie import Node, PrefixTrie, keys
from runner.cache.trie_session import TrieSession
from tests.cache.fakes import FAMILIES, FakeLayer

TOKENS = list(range(1, 9))
everyone = pytest.mark.parametrize("family", FAMILIES)


class World:
    """Stacks over a trie, without a cache."""

    def __init__(self, family: str) -> None:
        self.stacks = Stacks(lambda: [kind() for kind in FAMILIES[family]])
        self.trie = PrefixTrie()

    def open(self, tokens: Sequence[int]) -> TrieSession:
        """A session that has read all of its prompt and kept it."""
        stack, end = self.stacks.take()
        assert end is None
        see(stack, tokens)
        node = self.keep(stack, tokens)
        session = TrieSession(stack, [*tokens], Match(0, 0), node, lambda *_: None, lambda *_: None)
        self.stacks.sessions.append(session)
        return session

    def close(self, session: TrieSession) -> None:
        self.stacks.sessions.remove(session)
        self.stacks.keep(session.stack, session.node)

    def keep(self, stack: LayerStack, tokens: Sequence[int]) -> Node:
        root = self.trie.root()
        for node in self.trie.advance(root, keys(tokens)):
            resume.fill(stack, node)
        return self.trie.match(root, keys(tokens)).path[-1]

    def homes(self, node: Node) -> list[bool | None]:
        """Of each slot of a node whether it is live; None where nothing is held."""
        return [None if slot is None else slot.live for slot in node.slots]


def see(stack: LayerStack, tokens: Sequence[int]) -> None:
    with stack.forward(len(tokens)):
        for layer in stack.layers:
            assert isinstance(layer, FakeLayer)
            layer.see(tokens)


@everyone
def test_the_kept_stack_is_taken_once(family: str) -> None:
    world = World(family)
    kept = world.stacks.kept
    assert world.stacks.idle
    first = world.open(TOKENS)
    assert first.stack is kept
    assert not world.stacks.idle
    assert world.open([1, 2, 90]).stack is not kept
    world.stacks.sessions.pop()
    world.close(first)
    assert (world.stacks.kept, world.stacks.end, world.stacks.idle) == (kept, first.node, True)
    assert world.stacks.take() == (kept, first.node)
    assert world.stacks.end is None


@everyone
def test_who_is_kept_takes_the_place_of_the_former(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    world.close(first)
    assert world.homes(first.node) == [True, True]
    world.close(second)
    assert (world.stacks.kept, world.stacks.end) == (second.stack, second.node)
    assert world.homes(first.node) == [False, False], "copied out"
    assert world.homes(second.node) == [True, True]
    assert (first.stack.position, first.stack.nbytes) == (0, 0)


@everyone
def test_the_same_stack_is_kept_again(family: str) -> None:
    world = World(family)
    first = world.open(TOKENS)
    world.close(first)
    stack, end = world.stacks.take()
    assert end is not None
    world.stacks.keep(stack, end)
    assert world.homes(end) == [True, True]
    assert stack.position == len(TOKENS)


@everyone
def test_a_former_one_in_use_is_left_alone(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    world.close(second)
    assert world.stacks.kept is second.stack
    assert (first.stack.position, world.homes(first.node)) == (len(TOKENS), [True, True])


@everyone
def test_what_others_hold_is_live_there(family: str) -> None:
    """Of two that hold the same eight tokens, one is given up: slices are live in the other, states are copied out."""
    world = World(family)
    first = world.open(TOKENS)
    second = world.open([*TOKENS, 7])
    assert set(first.stack.live()) > set()
    left = world.stacks.only_in(first.stack)
    slices = [state.sliceable for state in first.stack.states]
    assert len(left) == slices.count(False)
    shared = [slot for slot, sliceable in zip(first.node.slots, slices, strict=True) if sliceable]
    assert all(slot in second.stack.live() for slot in shared)
    assert all(node.parent or not node.slots for node in first.node.path())
    world.stacks.sessions.remove(first)
    first.stack.reset()
    assert world.homes(first.node) == slices


@everyone
def test_the_kept_one_takes_over_too(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([*TOKENS, 7])
    world.close(second)
    left = world.stacks.only_in(first.stack)
    assert len(left) == [state.sliceable for state in first.stack.states].count(False)


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_whoever_is_adrift_takes_over_nothing(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([*TOKENS, 7])
    second.adrift = True
    assert world.stacks.sharing == [first]
    live = first.stack.live()
    assert world.stacks.only_in(first.stack) == live


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_a_hole_is_filled_by_who_has_it(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([*TOKENS, 7])
    held = first.node.slots[0]
    assert held is not None
    held.close()
    first.node.slots[0] = None
    world.stacks.only_in(first.stack)
    assert first.node.slots[0] in second.stack.live()


@everyone
def test_bytes_are_those_of_every_stack_once(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    each = first.stack.nbytes, second.stack.nbytes
    assert world.stacks.nbytes == sum(each)
    world.close(first)
    assert world.stacks.nbytes == sum(each)
    world.close(second)
    assert world.stacks.nbytes == each[1] + world.stacks.layout.ledger.nbytes
    assert world.stacks.layout.ledger.nbytes == sum(node.nbytes for node in first.node.path()) > 0


@everyone
def test_giving_up_the_kept_one_leaves_it_empty(family: str) -> None:
    world = World(family)
    first = world.open(TOKENS)
    world.close(first)
    world.stacks.give_up_kept()
    assert (world.stacks.end, world.stacks.kept.nbytes, world.stacks.kept.position) == (None, 0, 0)
    assert world.homes(first.node) == [False, False]


@everyone
@pytest.mark.parametrize("idle", [True, False])
def test_renewing_lets_go_of_all_but_who_runs(family: str, idle: bool) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    if idle:
        world.close(first)
    kept, layout = world.stacks.kept, world.stacks.layout
    ledger = layout.ledger
    world.trie.clear()
    world.stacks.renew()
    assert second.adrift
    assert first.adrift != idle
    assert world.stacks.sharing == []
    assert world.stacks.kept is not kept
    assert (world.stacks.end, world.stacks.kept.nbytes) == (None, 0)
    assert world.stacks.layout is layout
    assert layout.ledger is not ledger
    assert (layout.ledger.count, ledger.count, ledger.nbytes) == (0, 0, 0)
    assert kept.position == (0 if idle else len(TOKENS)) or kept.nbytes == 0
    see(second.stack, [5])
    assert second.stack.position == 4
