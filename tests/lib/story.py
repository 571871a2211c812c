"""A small language for stories about a cache, which checks at every step what must hold.

A `Conversation` drives a cache over fake layers in the order of the engine: prefill in chunks, the last token of the
prompt kept for decode, and the forward of every sampled token dispatched before that token is read and recorded.
Several users are several prompts of one `Conversation`, one after the other; `together.py` has them at the same time.

    users = Conversation("K", "trie")              # two layers of keys and values, under the trie cache
    users.turn([1, 2, 3, 4, 5], [20, 21])          # a request, and the answer that the model gives
    users.turn([1, 2, 3, 9], [30])                 # another one, which diverges after three tokens
    assert users.shape == "0-3 [3-5 3-7]"          # the trie: edges, children in brackets, checkpoints with a star
    assert users.serve([1, 2, 3, 9, 30]) == (4, 1)  # tokens cached, and tokens remaining

It compares

* after every step, what the layers show with what fresh layers show that saw the same tokens at once;
* after begin and close, that all layers stand at one offset;
* for the trie, after every step: its structure, its locks, its bytes, and the content of every snapshot in it.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from runner.cache.checkpoints import Checkpoint, CheckpointPolicy, Site
from runner.cache.eviction import EvictionOrder, _rank
from runner.cache.layer_interface import Snapshot
from runner.cache.node import Node, spelled
from runner.cache.sequence import SequenceLayers
from runner.cache.session import Session, TrieSession
from runner.cache.single import SingleEntryCache
from runner.cache.trie_cache import TrieCache
from tests.lib.fakes import FAMILIES, FakeKV, FakeLayer, content_of, facts_of_fakes, shown

CHUNK = 5


class CancelledError(Exception):
    """The client left."""


class Served(NamedTuple):
    """The numbers of cached and of remaining tokens of a prompt."""

    cached: int
    remaining: int


class Conversation:
    """The users of one cache. `kind` is "single" or "trie"; `budget` and `policy` are the trie's."""

    def __init__(
        self,
        family: str,
        kind: str = "single",
        *,
        chunk: int = CHUNK,
        budget: int | None = None,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        self.kinds = FAMILIES[family]
        self.chunk = chunk
        self.budget = budget
        self.layers: list[FakeLayer] = []
        facts = facts_of_fakes(self.kinds, self.make_layers)
        self.cache: SingleEntryCache | TrieCache = (
            SingleEntryCache(facts) if kind == "single" else TrieCache(facts, budget, policy or BranchOnly())
        )

    def make_layers(self) -> list[object]:
        self.layers = [kind() for kind in self.kinds]
        return list(self.layers)

    @property
    def trie(self) -> TrieCache:
        assert isinstance(self.cache, TrieCache)
        return self.cache

    @property
    def sequence(self) -> SequenceLayers:
        if isinstance(self.cache, TrieCache):
            return self.cache.sequences.kept
        assert self.cache.sequence is not None
        return self.cache.sequence

    @property
    def record(self) -> list[int]:
        """The tokens that the layers hold, according to the cache."""
        if isinstance(self.cache, SingleEntryCache):
            return self.cache.tokens
        end = self.cache.sequences.end
        return list(spelled(end.path())) if end else []

    @property
    def offsets(self) -> set[int]:
        return {state.offset for _, state in self.sequence.used} or {0}

    @property
    def shape(self) -> str:
        """The trie, as "0-5 [5-8* 5-9]": edges, checkpoints with a star, children in brackets."""
        return shape(self.nodes)

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the trie, parents before their children."""
        return list(self.trie.trie.nodes())

    def node(self, tokens: Sequence[int]) -> Node:
        """Returns the node that ends exactly with these tokens."""
        (node,) = (node for node in self.nodes if list(spelled(node.path())) == list(tokens))
        return node

    def turn(
        self,
        prompt: Sequence[int],
        answer: Sequence[int] = (20, 21),
        *,
        salt: str = "",
        before_record: Callable[[int], None] = lambda _: None,
        before_close: Callable[[SequenceLayers], None] = lambda _: None,
    ) -> Session:
        """Serves a request to its end; the model says `answer`.

        `before_record(k)` runs after the forward of the k-th sampled token was dispatched, before it is recorded. An
        error that it or `before_close` raises is the fault.
        """
        session = self._begin(prompt, salt)
        try:
            self.prefill(session, prompt)
            self.forward(session, prompt[-1:], prompt)
            for k, token in enumerate(answer):
                self.forward(session, [token], [*prompt, *answer[: k + 1]])
                before_record(k)
                session.record(token)
            before_close(self.sequence)
        except CancelledError:
            pass
        finally:
            session.close()
            self.check_closed()
        return session

    def serve(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> Served:
        """Serves a request as the tables of the scenarios count: the last token of the answer is recorded but not seen
        by the layers, and without an answer neither is the last token of the prompt."""
        session = self._begin(prompt)
        self.prefill(session, prompt)
        for k, token in enumerate(answer):
            said = [*prompt, *answer[:k]]
            self.forward(session, said[-1:], said)
            session.record(token)
        session.close()
        self.check_closed()
        return Served(session.cached, len(session.remaining))

    def cancelled_prefill(
        self, prompt: Sequence[int], after_chunks: int | None = None, *, until: int | None = None
    ) -> Session:
        """Begins a request whose client leaves after `after_chunks` chunks, or once `until` tokens are reached."""
        session = self._begin(prompt)
        self.prefill(session, prompt, after_chunks, until)
        session.close()
        self.check_closed()
        return session

    def failed_forward(self, prompt: Sequence[int], after_chunks: int) -> Session:
        """Begins a request whose next forward fails between two layers."""
        session = self._begin(prompt)
        self.prefill(session, prompt, after_chunks)
        with suppress(MemoryError), session.forward(1):
            self.layers[0].see(prompt[:1])
            raise MemoryError
        session.close()
        self.check_closed()
        return session

    def forward(self, session: Session, tokens: Sequence[int], all_of_it: Sequence[int]) -> None:
        """Runs a forward over `tokens`, the last of `all_of_it`."""
        with session.forward(len(tokens)):
            for layer in self.layers:
                layer.see(tokens)
        check_content(self.layers, self.kinds, all_of_it)
        assert self.offsets == {len(all_of_it)}
        if isinstance(session, TrieSession):
            self.check_trie(session.node)

    def check_closed(self) -> None:
        """Checks the cache between two sessions."""
        assert self.offsets == {len(self.record)}
        if self.record:
            check_content(self.layers, self.kinds, self.record)
        if isinstance(self.cache, TrieCache):
            self.check_trie(None)
            assert self.budget is None or self.cache.nbytes <= self.budget

    def check_trie(self, in_use: Node | None) -> None:
        """Checks edges, locks, snapshots and bytes while a session uses this node, or none does."""
        assert [session.node for session in self.trie.sequences.sharing] == ([in_use] if in_use else [])
        check_trie(self.trie, self.kinds)

    def _begin(self, prompt: Sequence[int], salt: str = "") -> Session:
        session = self.cache.begin(prompt, salt)
        assert [layer for layer in session.layers if layer in self.layers] == self.layers
        assert session.total == len(prompt)
        assert session.cached <= session.matched <= session.total
        assert session.cached < session.total
        assert session.remaining == list(prompt[session.cached :])
        assert self.offsets == {session.cached}
        if session.cached:
            check_content(self.layers, self.kinds, prompt[: session.cached])
        if isinstance(session, TrieSession):
            self.check_trie(session.node)
        return session

    def prefill(
        self, session: Session, prompt: Sequence[int], after_chunks: int | None = None, until: int | None = None
    ) -> None:
        at, done = session.cached, 0
        while count := session.next_forward(self.chunk):
            if done == after_chunks or (until is not None and at >= until):
                return
            self.forward(session, prompt[at : at + count], prompt[: at + count])
            at, done = at + count, done + 1


def check_trie(cache: TrieCache, kinds: Sequence[type[FakeLayer]]) -> None:
    """Checks that edges, locks, snapshots, bytes, sequences and the order of eviction agree with each other, however
    many sessions are open."""
    sequences = cache.sequences
    ends = [*sequences.parked.values(), *(session.node for session in sequences.sharing)]
    locks = Counter(node for end in ends for node in end.path())
    held: list[Snapshot] = []
    for root in cache.trie.roots.values():
        assert not root.tokens
        assert not root.slots
        _check_below(root, kinds, {kind: kind() for kind in kinds if kind is not FakeKV}, locks, held)
    assert not locks, "used nodes that are not in the trie, or roots"
    owned = sum(snapshot.nbytes for snapshot in held)
    assert (len(held), owned) == (sequences.totals.ledger.count, cache.paged_bytes)
    among = {sequences.kept, *sequences.parked, *(session.sequence for session in sequences.sharing)}
    live = Counter(snapshot for sequence in among for state in sequence.states for snapshot in state.live)
    assert live == Counter(snapshot for snapshot in held if snapshot.live), "live elsewhere, or twice"
    everyone = among | {session.sequence for session in sequences.sessions}
    layers = [layer for sequence in everyone for layer in sequence.layers if isinstance(layer, FakeLayer)]
    assert cache.nbytes == owned + cache.reserved_bytes + sum(layer.nbytes for layer in layers)
    in_round = {session.sequence for session in sequences.sessions if session.in_round}
    for sequence in everyone - in_round:
        assert {state.offset for _, state in sequence.used} <= {sequence.position}
    if sequences.idle:
        recorded = spelled(sequences.end.path()) if sequences.end else []
        assert sequences.kept.position == len(recorded)
        if recorded:
            check_content(sequences.kept.layers, kinds, recorded)
    else:
        assert sequences.end is None
    for sequence, end in sequences.parked.items():
        assert sequence.position == end.end
        check_content(sequence.layers, kinds, spelled(end.path()))
    check_order(cache)


def rank(order: EvictionOrder, node: Node, now: int) -> tuple[float, int, int]:
    """Returns the rank of a node at the time `now` of its trie; the least is evicted first."""
    return _rank(order.weight(node), node.used, -node.end, now)


def check_order(cache: TrieCache) -> None:
    """Checks that a fresh look at all nodes finds the same next victim, and the same weight of every node."""
    eviction, spared, now = cache.enforcer._eviction, cache.sequences.end, cache.trie.now
    order = eviction.order
    ranks = [
        rank(order, node, now)
        for node in cache.trie.nodes()
        if node is not spared and not node.occupied and order.evictable(node)
    ]
    victim = next((node for node in eviction.victims() if node is not spared), None)
    assert [rank(order, victim, now)] == [min(ranks)] if victim else not ranks
    assert all(weight == order.weight(node) for node, (weight, _) in eviction._places.items())


def check_content(layers: Sequence[object], kinds: Sequence[type[FakeLayer]], tokens: Sequence[int]) -> None:
    """Checks that every layer shows what a fresh one does that saw these tokens."""
    assert [layer.view() for layer in layers if isinstance(layer, FakeLayer)] == [shown(kind, tokens) for kind in kinds]


def _check_below(
    node: Node,
    kinds: Sequence[type[FakeLayer]],
    at_end: dict[type[FakeLayer], FakeLayer],
    locks: Counter[Node],
    held: list[Snapshot],
) -> None:
    """Checks this node and those below it. `at_end` holds whole-state layers that saw the tokens up to its end."""
    assert node.locks == locks.pop(node, 0)
    for kind, snapshot in zip(kinds, node.slots, strict=False):
        if snapshot is None:
            continue
        held.append(snapshot)
        assert snapshot.stop == node.end
        assert kind is not FakeKV or snapshot.start == node.start
        assert not (snapshot.live and snapshot.nbytes)
        expected = tuple(node.tokens) if kind is FakeKV else at_end[kind].view()[snapshot.start - snapshot.stop :]
        assert content_of(snapshot) == expected, f"{kind.__name__} in {node!r}"
    for first, child in node.children.items():
        assert child.parent is node
        assert child.tokens[0] == first  # so no sibling has the same
        assert child.start == node.end
        below = {kind: copy.copy(layer) for kind, layer in at_end.items()}  # they replace what they hold
        for layer in below.values():
            layer.see(child.tokens)
        _check_below(child, kinds, below, locks, held)


class BranchOnly(CheckpointPolicy):
    """Stops only where prompts were seen to diverge."""

    def plan(
        self, tokens: Sequence[int], cached: int, branch: int, most: int | None, fits: int | None = None
    ) -> list[Checkpoint]:
        wanted = {branch: Site.BRANCH, **dict.fromkeys(self.wanted(len(tokens)), Site.START)}
        ahead = [Checkpoint(at, wanted[at]) for at in sorted(wanted) if cached < at < len(tokens)][:most]
        return [Checkpoint(cached, Site.START), *ahead] if wanted.get(cached) is Site.START else ahead

    def wanted(self, end: int) -> Sequence[int]:
        """Returns the checkpoints of a prompt that ends at `end`."""
        return ()


class At(BranchOnly):
    """Checkpoints at these offsets."""

    def __init__(self, *offsets: int) -> None:
        super().__init__()
        self.offsets = offsets

    def wanted(self, end: int) -> Sequence[int]:
        return self.offsets


class Every(BranchOnly):
    """Checkpoints at multiples of an interval, and some tokens before the end."""

    def __init__(self, interval: int = 8, before_end: int = 4) -> None:
        super().__init__()
        self.interval = interval
        self.before_end = before_end

    def wanted(self, end: int) -> Sequence[int]:
        return (*range(self.interval, end, self.interval), end - self.before_end)


def shape(nodes: Iterable[Node]) -> str:
    """Returns the shape of some nodes, as `Conversation.shape` does."""
    return " ".join(sorted(_shape(node) for node in nodes if node.parent and not node.parent.parent))


def _shape(node: Node) -> str:
    below = " ".join(sorted(_shape(child) for child in node.children.values()))
    return f"{node.start}-{node.end}{'*' if node.checkpoint else ''}{f' [{below}]' if below else ''}"
