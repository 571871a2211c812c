"""The product's own cache without a model, for one request or several at once.

The layers are mlx-lm's, and a token takes a few bytes of them: a `Kind` has the bytes of a real model over a power of
2. So adapters, trie, sessions, checkpoints and eviction are the runner's own, and so is the count of bytes. Not
simulated: batches, drafts, media, the disk. Requests that overlap in time take turns, forward by forward; a round lasts
as long as its longest forward, at the speeds of a laptop.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import mlx.core as mx

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from runner.cache.checkpoints import Checkpoint, CheckpointPolicy, Site
from runner.cache.eviction import BudgetEnforcer, EvictionOrder
from runner.cache.node import Node
from runner.cache.session import TrieSession
from runner.cache.sketch import LayerFacts, Sketch
from runner.cache.trie_cache import TrieCache
from runner.scan_calls import announced
from runner.settings import GPU_CHUNK_TOKENS
from scripts.tools.bench.servers import OLLAMA, OURS
from scripts.tools.bench.traces.bounds import Kind
from scripts.tools.bench.traces.form import TURN, Request, Turns

from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache  # isort: skip

KINDS: Mapping[str, Kind] = {
    "kv": Kind(2),
    "w128": Kind(6, 6, 128),
    "w1024": Kind(2, 10, 1024),
    "hyb": Kind(2, state=3144),
}
"""The proportions of Llama-3.1-8B, of gpt-oss-20b (half of its layers have windows of 128 tokens), of gemma-3-12b (five
of six layers have windows of 1,024) and of Qwen3.5-9B (three of four layers have states), with keys of 16 bits."""
_STEPS = 256  # of an answer, taken at once: only the checks of the budget are fewer
_PROMPT_MS, _ANSWER_MS = 2.0, 25.0  # a token


class Lru(EvictionOrder):
    """Evicts the path that was used least recently, from its end; of the path in use, its checkpoints."""

    def weight(self, node: Node) -> float:
        return 1.0


class OllamaOrder(EvictionOrder):
    """Evicts or merges the node that was used least recently, of those with at most one child."""

    def used(self, node: Node) -> Sequence[Node]:
        return (node,)

    def evictable(self, node: Node) -> bool:
        return len(node.children) <= 1

    def weight(self, node: Node) -> float:
        return 1.0


class OllamaPoints(CheckpointPolicy):
    """Places checkpoints every 8,192 tokens, four tokens before the end, and where another prompt diverges."""

    def plan(
        self, tokens: Sequence[int], cached: int, branch: int, most: int | None, fits: int | None = None
    ) -> list[Checkpoint]:
        end = len(tokens)
        points = {branch: Site.BRANCH} | dict.fromkeys(range(8192, end, 8192), Site.FAR) | {end - 4: Site.BEFORE}
        return [Checkpoint(at, site) for at, site in sorted(points.items()) if cached < at < end]


class Policy(NamedTuple):
    points: type[CheckpointPolicy]
    order: type[EvictionOrder]


LRU = "LRU"
POLICIES: Mapping[str, Policy] = {
    OURS: Policy(CheckpointPolicy, EvictionOrder),
    LRU: Policy(CheckpointPolicy, Lru),
    OLLAMA: Policy(OllamaPoints, OllamaOrder),
}


class Played(NamedTuple):
    """The work of the cache for one request."""

    cached: int
    forwards: int
    """Over the prompt, without the step that begins the answer."""
    others_bytes: int
    """The most bytes held at once beside the paths of running requests."""


def facts_of(kind: Kind) -> LayerFacts:
    def make() -> list[object]:
        found: list[object] = [KVCache()]
        if kind.window:
            found.append(RotatingKVCache(kind.window))
        if kind.state:
            found.append(ArraysCache(1))
        return found

    return Sketch(make, partial(see, kind), 2).facts


@announced("state", "tokens")
def _scan(state: object, tokens: mx.array, size: int) -> tuple[mx.array, mx.array]:
    return tokens, mx.zeros((1, size), mx.uint8)


def see(kind: Kind, tokens: mx.array, layers: Sequence[object]) -> mx.array:
    """Fills the layers as a model's forward over [1, L] tokens does."""
    for layer in layers:
        if isinstance(layer, ArraysCache):
            _, layer[0] = _scan(layer[0], tokens, kind.state)
        elif isinstance(layer, KVCache | RotatingKVCache):
            size = kind.token if isinstance(layer, KVCache) else kind.window_token
            half = mx.zeros((1, 1, tokens.shape[-1], size // 2), mx.uint8)
            layer.update_and_fetch(half, half)  # type: ignore[no-untyped-call]
    return tokens


class Simulation:
    """A cache that serves requests. `chunk` and `steps` are the most tokens of a forward of a prompt, and of an answer;
    `turn` is the token around messages."""

    def __init__(
        self,
        kind: Kind,
        budget: int | None,
        policy: str = OURS,
        *,
        chunk: int = GPU_CHUNK_TOKENS,
        steps: int = _STEPS,
        turn: int = TURN,
    ) -> None:
        self._kind, self._chunk, self._steps = kind, chunk, steps
        points, order = POLICIES[policy]
        self._cache = TrieCache(facts_of(kind), budget, points(frozenset({turn})))
        self._cache.enforcer = BudgetEnforcer(self._cache.trie, self._cache.sequences, order)
        self._round_ms = 0.0
        self._tokens = mx.zeros((1, max(chunk, steps)), mx.uint8)

    def play(self, requests: Sequence[Request], parallel: int = 1) -> list[Played]:
        """Returns what the cache did, request by request; it serves at most `parallel` at once."""
        found: dict[int, Played] = {}
        turns, running, now_ms = Turns(requests), dict[int, Iterator[Played]](), 0.0
        while running or len(found) < len(requests):
            while len(running) < parallel and (number := turns.next(now_ms if running else inf)) is not None:
                now_ms = max(now_ms, requests[number].at_ms)
                prompt = requests[number].prompt
                if running and (not self._cache.admits(len(prompt)) or self._cache.follows(prompt)):
                    turns.put_back(number)
                    break
                running[number] = self._serve(self._cache.begin(prompt), requests[number].answer)
            self._round_ms = 0.0
            for number, each in [*running.items()]:
                played = next(each, None)
                if played is None:
                    del running[number]
                    turns.end(number)
                else:
                    found[number] = played
            now_ms += self._round_ms
        return [found[number] for number in range(len(requests))]

    def _serve(self, session: TrieSession, answer: Sequence[int]) -> Iterator[Played]:
        """Computes a request, and yields after each forward what it took so far."""
        forwards = others = 0
        try:
            while count := session.next_forward(self._chunk):
                forwards += 1
                others = max(others, self._forward(session, count, _PROMPT_MS))
                yield Played(session.cached, forwards, others)
            self._forward(session, 1, _ANSWER_MS)
            for at in range(0, len(answer), self._steps):
                some = answer[at : at + self._steps]
                others = max(others, self._forward(session, len(some), _ANSWER_MS))
                session.recorded.extend(some)
                yield Played(session.cached, forwards, others)
        finally:
            session.close()

    def _forward(self, session: TrieSession, count: int, token_ms: float) -> int:
        """Returns the bytes held beside the paths of running requests."""
        with session.forward(count):
            see(self._kind, self._tokens[:, :count], session.layers)
            mx.eval(session.state())
        self._round_ms = max(self._round_ms, count * token_ms)
        running = self._cache.sequences.sessions
        own = {node: node.nbytes for each in running for node in each.node.path()}
        return self._cache.nbytes - sum(own.values()) - sum(each.sequence.nbytes for each in running)
