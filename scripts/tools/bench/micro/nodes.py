"""`scripts/bench nodes`: what a trie of many nodes costs: to match, to cut, to evict, and a request's whole way.

The layers are mlx-lm's own classes with four numbers a token, so that bytes cost next to nothing and what is left is
the work for each node and layer: "slices" has nothing but layers of keys and values; "states" has recurrent layers in
every other place, and with them the other order of eviction. Nodes that no request left are put in by hand, their
arrays their own. There is no model: a forward writes what a model would have written, which counts for the request.

    match     a known prompt to its end
    cut       an edge in two, all layers, the copies computed
    evict     whatever has to go for a byte less, right after a request
    request   from begin to close: 40 known tokens that part within an edge, 24 others, and the one that is answered

The large trie and the small one take turns.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__

# isort: split
from mlx_lm.models.cache import ArraysCache, KVCache

from runner.cache.layers.snapshot import Owned, SliceSnapshot, StateSnapshot
from runner.cache.node import Node, keys, spelled
from runner.cache.trie_cache import TrieCache
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.options import numbers
from scripts.tools.bench.common.report import Report, Table, Target

ORDERS = {"slices": False, "states": True}
STEPS = ("match", "cut", "evict", "request")
AIMED_NODES = 10_000
MOST_MS = 5.0
_EDGE = 16  # tokens
_BRANCHES = 16  # conversations with one beginning
_WIDTH = 4
_KNOWN, _OTHERS = 40, 24  # tokens of a request


class Times(NamedTuple):
    """Of one turn, in milliseconds, by the names of STEPS."""

    match: float
    cut: float
    evict: float
    request: float


class Forest:
    """A trie cache of so many nodes: beginnings of one edge, conversations of two edges below each."""

    def __init__(self, nodes: int, layers: int, stateful: bool, seed: int) -> None:
        self._random = Random(seed)
        self._layers = layers
        self._stateful = stateful
        self._words = 0
        self.cache = TrieCache(self._make_layers)
        self._ask(self._fresh(2 * _EDGE))
        self._ask(self._fresh(2 * _EDGE))  # whose nodes show what the layers are
        self._leaves = list(self._plant(nodes - 2))
        self.cache.enforce_budget()

    def turn(self) -> Times:
        """Every step once."""
        trie = self.cache.trie
        leaf = self._leaf()
        prompt = spelled(leaf.path())
        match_ms = _ms(lambda: trie.match(trie.root(), prompt))
        cut_ms = _ms(lambda: self._cut(leaf))
        assert leaf.parent is not None
        trie.merge(leaf.parent)
        known = [*spelled(self._leaf().path())[:_KNOWN], *self._fresh(_OTHERS)]
        request_ms = _ms(lambda: self._ask(known))
        self.cache.budget_bytes = self.cache.nbytes - 1
        evict_ms = _ms(self.cache.enforce_budget)
        self.cache.budget_bytes = None
        return Times(match_ms, cut_ms, evict_ms, request_ms)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return sum(1 for _ in self.cache.trie.nodes())

    def _cut(self, leaf: Node) -> None:
        self.cache.trie.split(leaf, _EDGE // 2)
        self.cache.sequences.flush()

    def _leaf(self) -> Node:
        """One of those planted that is still whole; others if all are gone."""
        while True:
            self._leaves = self._leaves or list(self._plant(1 + 2 * _BRANCHES))
            leaf = self._random.choice(self._leaves)
            if leaf.parent is not None and len(leaf.tokens) == _EDGE:
                return leaf
            self._leaves.remove(leaf)

    def _plant(self, nodes: int) -> Iterator[Node]:
        left = nodes
        while left > 0:
            beginning = self._node(self.cache.trie.root())
            left -= 1
            for _ in range(min(_BRANCHES, left // 2)):
                yield self._node(self._node(beginning))
                left -= 2

    def _node(self, parent: Node) -> Node:
        (node,) = self.cache.trie.advance(parent, keys(self._fresh(_EDGE)))
        ledger = self.cache.sequences.facts.ledger
        for layer in range(self._layers):
            pair = [mx.zeros((1, 1, _EDGE, _WIDTH)) for _ in range(2)]
            if self._is_state(layer):
                state: list[mx.array | None] = [*pair]
                node.slots.append(StateSnapshot(node.end - 1, node.end, None, ledger, Owned(state, pair)))
            else:
                node.slots.append(SliceSnapshot(node.start, node.end, None, ledger, Owned(pair, pair)))
        mx.eval([held.content for held in node.slots if isinstance(held, SliceSnapshot | StateSnapshot)])
        self.cache.enforcer.touch(node)
        return node

    def _ask(self, prompt: list[int]) -> None:
        session = self.cache.begin(prompt)
        try:
            while session.position < len(prompt):
                count = session.next_forward(len(prompt)) or 1
                with session.forward(count):
                    for layer in session.layers:
                        _write(layer, count)
                mx.eval(session.state())
        finally:
            session.close()

    def _fresh(self, count: int) -> list[int]:
        """Tokens that were never seen."""
        self._words += count
        return list(range(self._words - count, self._words))

    def _is_state(self, layer: int) -> bool:
        return self._stateful and layer % 2 == 1

    def _make_layers(self) -> list[object]:
        return [ArraysCache(2) if self._is_state(layer) else KVCache() for layer in range(self._layers)]


def _write(layer: object, tokens: int) -> None:
    entries = mx.ones((1, 1, tokens, _WIDTH))
    if isinstance(layer, KVCache):
        layer.update_and_fetch(entries, entries)
    elif isinstance(layer, ArraysCache):
        for place in range(2):
            layer[place] = mx.ones((1, 1, _EDGE, _WIDTH))


def _ms(do: Callable[[], object]) -> float:
    started = perf_counter()
    do()
    return 1e3 * (perf_counter() - started)


@dataclass(frozen=True)
class NodesReport(Report):
    """By order and number of nodes: the times of every turn."""

    layers: int
    times: Mapping[str, Mapping[int, Sequence[Times]]]

    @property
    def targets(self) -> Sequence[Target]:
        """Of 95 turns in 100."""
        return [
            Target(f"{order}, {nodes:,} nodes: {step}", _most(found, step), MOST_MS, unit=" ms")
            for order, by_nodes in self.times.items()
            for nodes, found in by_nodes.items()
            for step in ("match", "cut", "evict")
            if nodes == AIMED_NODES
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """Milliseconds."""
        rows = [
            (
                f"{order}, {nodes:,} nodes",
                step,
                *(f"{value:.3f}" for value in (median(_of(found, step)), _most(found, step), max(_of(found, step)))),
            )
            for order, by_nodes in self.times.items()
            for step in STEPS
            for nodes, found in by_nodes.items()
        ]
        title = f"ms, {self.layers} layers, {len(next(iter(next(iter(self.times.values())).values())))} turns"
        return [Table(title, ("", "", "median", "95 of 100", "worst"), rows)]

    def data(self) -> Mapping[str, object]:
        """For JSON: by order, number of nodes and step, a value for each turn."""
        return {
            "layers": self.layers,
            "times_ms": {
                order: {str(nodes): {step: _of(found, step) for step in STEPS} for nodes, found in by_nodes.items()}
                for order, by_nodes in self.times.items()
            },
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """Medians, a chart for each order of eviction."""
        return [
            Bars(
                f"{order}, {self.layers} layers: median ms",
                STEPS,
                {f"{nodes:,} nodes": [median(_of(found, step)) for step in STEPS] for nodes, found in by_nodes.items()},
                digits=3,
                log=True,
                target=MOST_MS,
            )
            for order, by_nodes in self.times.items()
        ]


def _of(found: Sequence[Times], step: str) -> list[float]:
    at = STEPS.index(step)
    return [times[at] for times in found]


def _most(found: Sequence[Times], step: str) -> float:
    """Returns the time that 95 turns in 100 do not exceed."""
    values = _of(found, step)
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--nodes", type=numbers, default=(1000, AIMED_NODES), metavar="N,...", help="1000,10000")
    parser.add_argument("--layers", type=int, default=48, metavar="N", help="of the model (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=100, metavar="N", help="of each trie (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> NodesReport:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    if min(*arguments.nodes, arguments.turns) < 1 or arguments.layers < 2:
        raise ValueError("there is at least one node and one turn, and two layers")
    times: dict[str, dict[int, list[Times]]] = {}
    for order, stateful in ORDERS.items():
        forests: dict[str, Forest] = {}
        for nodes in arguments.nodes:
            say(f"{order}: planting {nodes} nodes ...")
            forests[str(nodes)] = Forest(nodes, arguments.layers, stateful, arguments.seed)
        found = interleave({name: forest.turn for name, forest in forests.items()}, arguments.turns)
        times[order] = {int(name): turns for name, turns in found.items()}
        for forest in forests.values():
            forest.cache.detach()  # nodes hold each other, and a gigabyte
    return NodesReport(arguments.layers, times)
