"""The trie by itself: what is where, what may be cut, joined and removed, and what it costs.

Scenarios 16 to 25 and 75 of docs/internals/cache.md, section 8.

Its snapshots are pieces that know which tokens they stand for and count what happens to them; nothing here needs MLX.
"""

import random
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from runner.cache.layer_interface import Snapshot
from runner.cache.node import Node, Tokens, keys, spelled
from runner.cache.trie import PrefixTrie


class Pieces:
    """Counts the snapshots that are open."""

    def __init__(self) -> None:
        self.open = 0


class Piece(Snapshot):
    """A snapshot that knows the tokens it stands for: those of its edge if it is a slice, all up to its end if it is a
    state. One byte a token."""

    live = False

    def __init__(self, pieces: Pieces, start: int, content: Sequence[int]) -> None:
        self.start = start
        self.stop = start + len(content)
        self.content = list(content)
        self.closed = False
        self._pieces = pieces
        pieces.open += 1

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        cut = at - self.start
        assert 0 < cut < len(self.content)
        self.close()
        return Piece(self._pieces, self.start, self.content[:cut]), Piece(self._pieces, at, self.content[cut:])

    def after(self, first: Snapshot | None) -> Snapshot | None:
        self.close()
        if first is None:
            return None
        assert isinstance(first, Piece)
        assert first.stop == self.start
        first.close()
        return Piece(self._pieces, first.start, first.content + self.content)

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True
        self._pieces.open -= 1


class State(Piece):
    """A state: nothing can be cut off it."""

    def __init__(self, pieces: Pieces, content: Sequence[int]) -> None:
        super().__init__(pieces, 0, content)
        self.start = self.stop - 1

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        return None, self

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is not None:
            first.close()
        return self


class Grove:
    """A trie whose nodes are filled as the cache fills them: a slice of each edge, an empty slot, and a state where
    something stopped."""

    def __init__(self) -> None:
        self.trie = PrefixTrie()
        self.pieces = Pieces()

    def put(self, *tokens: int, salt: str = "") -> Node:
        """A conversation from its beginning; returns its last node."""
        return self.go_on(self.trie.root(salt), *tokens)

    def go_on(self, node: Node, *tokens: int) -> Node:
        """Tokens after `node`; returns the last node."""
        for passed in self.trie.extend(node, keys(tokens)):
            passed.slots = passed.slots or [Piece(self.pieces, passed.start, passed.tokens), None, None]
            node = passed
        if node.slots[2] is None:
            node.slots[2] = State(self.pieces, spelled(node.path()))
        return node

    def find(self, *tokens: int, salt: str = "") -> tuple[list[Node], int]:
        return self.trie.match(self.trie.root(salt), keys(tokens))

    def check(self) -> None:
        """Checks the invariants of the trie."""
        pieces = 0
        for node in self.trie.nodes():
            whole = list(spelled(node.path()))
            assert node.parent is not None
            assert node.parent.children[node.tokens[0]] is node
            assert node.start == node.parent.end < node.end == len(whole)
            assert node.locks <= node.parent.locks
            kept, unused, state = node.slots
            assert isinstance(kept, Piece)
            assert (kept.start, kept.stop, kept.content) == (node.start, node.end, list(node.tokens))
            assert unused is None
            assert state is None or (isinstance(state, State) and state.content == whole)
            assert not kept.closed
            assert state is None or not state.closed
            pieces += 1 + (state is not None)
        assert pieces == self.pieces.open


def contents(node: Node) -> list[list[int] | None]:
    """Returns the tokens of each snapshot of a node."""
    return [held.content if isinstance(held, Piece) else None for held in node.slots]


def test_salts_share_nothing() -> None:
    grove = Grove()
    grove.put(1, 2, 3)
    other = grove.put(1, 2, 4, salt="adapter")
    assert [grove.find(1, 2, 3, salt=salt)[1] for salt in ("", "adapter", "third")] == [3, 2, 0]
    assert set(grove.trie.nodes()) == {grove.find(1, 2, 3)[0][-1], other}


def test_a_split_cuts_slices_and_leaves_states_below() -> None:
    """Scenario 18."""
    grove = Grove()
    below = grove.go_on(node := grove.put(1, 2, 3, 4, 5), 6)
    node.checkpoint = True
    upper = grove.trie.split(node, 3)
    assert (upper.tokens, upper.end, node.tokens, node.end) == (keys([1, 2, 3]), 3, keys([4, 5]), 5)
    assert contents(upper) == [[1, 2, 3], None, None]
    assert contents(node) == [[4, 5], None, [1, 2, 3, 4, 5]]
    assert (upper.checkpoint, node.checkpoint) == (False, True)
    assert (upper.children, node.children) == ({4: node}, {6: below})
    assert (upper.parent, node.parent, below.parent) == (grove.trie.root(), upper, node)
    grove.check()


@pytest.mark.parametrize("restored", [True, False])
def test_a_split_keeps_locks_age_and_origin_on_both_halves(restored: bool) -> None:
    grove = Grove()
    node = grove.put(1, 2, 3)
    node.restored = restored
    grove.trie.touch([node])
    grove.trie.lock(node)
    upper = grove.trie.split(node, 1)
    assert (upper.used, upper.locks, upper.restored) == (node.used, node.locks, node.restored) == (1, 1, restored)
    grove.trie.unlock(node)
    assert [each.locks for each in node.path()] == [0, 0, 0]


def test_changes_that_would_break_the_trie_are_refused() -> None:  # scenarios 21 and 22
    grove = Grove()
    trie, inner = grove.trie, grove.put(1, 2, 3)
    leaf, _, locked, empty = grove.go_on(inner, 3), grove.go_on(inner, 4), grove.put(5), trie.root("empty")
    trie.lock(locked)
    refused: list[tuple[str, Callable[..., object], *tuple[object, ...]]] = [
        *((r"cannot cut <0\.\.3>", trie.split, inner, at) for at in (-1, 0, 3, 4)),
        (r"cannot cut <0\.\.0>", trie.split, trie.root(), 1),
        *(("cannot merge", trie.merge, node) for node in (trie.root(), leaf, inner)),
        *(("cannot remove", trie.remove, node) for node in (trie.root(), empty, inner, locked)),
        (r"<3\.\.4> is not locked", trie.unlock, leaf),
    ]
    for message, change, *arguments in refused:
        with pytest.raises(ValueError, match=message):
            change(*arguments)
        grove.check()
    assert [node.locks for node in (trie.root(), inner, leaf, locked)] == [1, 0, 0, 1]


def test_a_fork_offers_the_way_that_was_used_last() -> None:
    trie = PrefixTrie()
    first, second = trie.extend(trie.root(), keys([1, 2, 3, 4])), trie.extend(trie.root(), keys([1, 2, 7, 8]))
    for used, expected in ((first, [3, 4]), (second, [7, 8])):
        trie.touch(used)
        assert trie.continuation(trie.root(), keys([1, 2]), 9).tolist() == expected


def test_any_continuation_is_a_path_of_the_trie() -> None:
    numbers, trie, texts = random.Random(5), PrefixTrie(), []
    for _ in range(200):
        text = [numbers.randrange(3) for _ in range(numbers.randint(1, 12))]
        texts.append(text)
        trie.touch(trie.extend(trie.root(), keys(text)))
        begun = [numbers.randrange(3) for _ in range(numbers.randint(0, 6))]
        found = trie.continuation(trie.root(), keys(begun), numbers.randint(1, 5)).tolist()
        whole = begun + found
        longer = [text for text in texts if text[: len(begun)] == begun and len(text) > len(begun)]
        assert bool(found) == bool(longer)
        assert any(text[: len(whole)] == whole for text in texts) or not found


words = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class Work(RuleBasedStateMachine):
    """Random work on a trie, beside a plain list of what was put in."""

    def __init__(self) -> None:
        super().__init__()
        self.grove = Grove()
        self.known: list[list[int]] = [[]]
        self.locked: list[Node] = []

    @rule(tokens=words, point=st.booleans())
    def put(self, tokens: list[int], point: bool) -> None:
        self.grove.put(*tokens).checkpoint |= point
        self.known.append(tokens)

    @precondition(lambda self: self._nodes())
    @rule(which=st.integers(0), tokens=words)
    def go_on(self, which: int, tokens: list[int]) -> None:
        node = self._node(which)
        self.known.append([*spelled(node.path()), *tokens])
        self.grove.go_on(node, *tokens)

    @precondition(lambda self: any(len(node.tokens) > 1 for node in self._nodes()))
    @rule(which=st.integers(0), at=st.integers(0))
    def split(self, which: int, at: int) -> None:
        long = [node for node in self._nodes() if len(node.tokens) > 1]
        node = long[which % len(long)]
        self.grove.trie.split(node, 1 + at % (len(node.tokens) - 1))

    @precondition(lambda self: any(map(self._mergeable, self._nodes())))
    @rule(which=st.integers(0))
    def merge(self, which: int) -> None:
        some = [node for node in self._nodes() if self._mergeable(node)]
        self.grove.trie.merge(some[which % len(some)])

    @precondition(lambda self: self._nodes())
    @rule(which=st.integers(0))
    def compact(self, which: int) -> None:
        end = self._node(which)
        kept = [node for node in end.path()[1:] if node is end or not (self._mergeable(node) and not node.checkpoint)]
        self.grove.trie.merge_needless(*end.path()[1:-1])
        assert end.path()[1:] == kept

    @precondition(lambda self: any(map(self._removable, self._nodes())))
    @rule(which=st.integers(0))
    def remove(self, which: int) -> None:
        some = [node for node in self._nodes() if self._removable(node)]
        node = some[which % len(some)]
        gone = list(spelled(node.path()))[: node.start + 1]
        self.known = [seen[: node.start] if seen[: len(gone)] == gone else seen for seen in self.known]
        self.grove.trie.remove(node)

    @precondition(lambda self: self._nodes())
    @rule(which=st.integers(0))
    def lock(self, which: int) -> None:
        self.locked.append(self._node(which))
        self.grove.trie.lock(self.locked[-1])

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0))
    def unlock(self, which: int) -> None:
        self.grove.trie.unlock(self.locked.pop(which % len(self.locked)))

    @rule(probe=words)
    def match(self, probe: list[int]) -> None:  # scenario 16
        path, matched = self.grove.find(*probe)
        assert matched == max(_common(probe, seen) for seen in self.known)
        assert list(spelled(path)[:matched]) == probe[:matched]
        assert matched == 0 or path[-1].start < matched <= path[-1].end

    @invariant()
    def everything_put_in_is_found(self) -> None:
        for seen in self.known:
            assert self.grove.find(*seen)[1] == len(seen)

    @invariant()
    def the_structure_holds(self) -> None:
        self.grove.check()
        for node in [self.grove.trie.root(), *self._nodes()]:
            assert node.locks == sum(node in locked.path() for locked in self.locked)
        for locked in self.locked:
            assert locked.path()[0] is self.grove.trie.root()

    def _nodes(self) -> list[Node]:
        return list(self.grove.trie.nodes())

    def _node(self, which: int) -> Node:
        nodes = self._nodes()
        return nodes[which % len(nodes)]

    @staticmethod
    def _mergeable(node: Node) -> bool:
        child = node.only_child()
        return child is not None and node.locks == child.locks

    @staticmethod
    def _removable(node: Node) -> bool:
        return not node.children and not node.locks


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of tokens that two sequences share at their beginning, by a plain loop."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def test_any_work_on_the_trie_keeps_what_was_put_in() -> None:
    limits = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Work, settings=limits)


NODES, PROMPT = 10_000, 100_000


class Watched(array):  # type: ignore[type-arg]  # array is not generic at run time before 3.12
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, index: int | slice) -> "int | Tokens":  # type: ignore[override]
        found: int | Tokens = super().__getitem__(index)
        self.read += 1 if isinstance(found, int) else len(found)
        return found


def _chain(tokens: Tokens, edge: int) -> PrefixTrie:
    trie = PrefixTrie()
    node = trie.root()
    for at in range(0, len(tokens), edge):
        (node,) = trie.extend(node, tokens[at : at + edge])
    return trie


@pytest.mark.parametrize("edge", [PROMPT // NODES, 1000, PROMPT])
def test_a_match_copies_each_token_of_the_prompt_once(edge: int) -> None:
    """Long or short edges: each token is copied once to be compared, and each node looks at one more."""
    prompt = Watched("i", random.Random(0).choices(range(1 << 17), k=PROMPT))
    trie = _chain(keys(prompt), edge)
    prompt.read = 0
    path, matched = trie.match(trie.root(), prompt)
    assert (matched, len(path)) == (PROMPT, PROMPT // edge + 1)
    assert prompt.read == PROMPT + PROMPT // edge
