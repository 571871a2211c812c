"""The least that a cache can compute, and caches that know the future.

`Paths` cuts the sequences of a trace wherever one parts from another. `belady` is exact for models whose layers are all
sliceable: every token is an item of one size, and a prefix is never needed later than the tokens after it. `packed` is
for models with restore points: it fits uses of points into memory and time, those first that save most tokens for a
byte and request. What it finds can be done, so the optimum lies between it and the least of all.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from runner.cache.node import keys
from runner.cache.trie import PrefixTrie
from scripts.tools.bench.traces.form import Request


class Kind(NamedTuple):
    """Bytes of a model's layers: of a token in sliceable layers, of a token in windows of so many tokens, and of all
    states."""

    token: int
    window_token: int = 0
    window: int = 0
    state: int = 0

    def point(self, at: int) -> int:
        """Returns the bytes of a restore point at this offset, beside its keys and values."""
        return min(at, self.window) * self.window_token + self.state


class Paths:
    """The requests of a trace as paths through its pieces."""

    def __init__(self, requests: Sequence[Request]) -> None:
        trie = PrefixTrie()
        root = trie.root()
        wholes = []
        self.lengths = [len(each.prompt) for each in requests]
        self.matched: list[int] = []
        """The tokens at the beginning of each prompt that are in earlier prompts and answers."""
        for each in requests:
            prompt = keys(each.prompt)
            self.matched.append(min(trie.match(root, prompt)[1], len(prompt) - 1))
            wholes.append(prompt + keys(each.answer))
            for stop in (self.matched[-1], len(prompt) - 1, len(wholes[-1])):
                trie.extend(root, wholes[-1][:stop])
        nodes = [*trie.nodes()]
        index = {node: number for number, node in enumerate(nodes)}
        self.sizes = [len(node.tokens) for node in nodes]
        self.ends = [node.end for node in nodes]
        self.paths = [[index[node] for node in trie.match(root, each)[0][1:]] for each in wholes]
        """For each request the pieces of its prompt and its answer."""
        self.tokens = sum(self.sizes)
        self.least = sum(self.lengths) - sum(self.matched)
        """The tokens that a cache computes which forgets nothing, and goes on from any token."""

    def working_set(self, kind: Kind) -> int:
        """Returns the bytes of all tokens, and of one point wherever a prompt leaves what was known."""
        left = {
            next((piece for piece in path if self.ends[piece] >= matched), -1): matched
            for path, matched in zip(self.paths, self.matched, strict=True)
            if matched
        }
        return self.tokens * kind.token + sum(map(kind.point, left.values()))

    def used(self, request: int) -> list[int]:
        """Returns the pieces of the prompt without its last token, which is always computed."""
        return [piece for piece in self.paths[request] if self.ends[piece] < self.lengths[request]]


def best(paths: Paths, kind: Kind, budget: int) -> int:
    """Returns the tokens that the best known policy computes, which knows the future."""
    if not kind.window and not kind.state:
        return belady(paths, kind, budget)
    ways = [(power, again) for power in (1.0, 0.6) for again in (False, True)]
    return min(packed(paths, kind, budget, power, again=again) for power, again in ways)


def belady(paths: Paths, kind: Kind, budget: int) -> int:
    """Evicts what is needed last."""
    count = len(paths.paths)
    uses: list[list[int]] = [[count + 1] for _ in paths.sizes]  # the later ones, the next one last
    for request in reversed(range(count)):
        for piece in paths.used(request):
            uses[piece].append(request)
    held: dict[int, int] = {}
    computed = 0
    for request, path in enumerate(paths.paths):
        cached = 0
        for piece in paths.used(request):
            uses[piece].pop()
            if cached == paths.ends[piece] - paths.sizes[piece]:
                cached += held.get(piece, 0)
        computed += paths.lengths[request] - min(cached, paths.matched[request])
        held.update((piece, paths.sizes[piece]) for piece in path)
        total = sum(held.values())
        running = set(path)
        for piece in sorted(held, key=lambda each: (each in running, -uses[each][-1], -paths.ends[each])):
            cut = min(held[piece], total - budget // kind.token)
            if cut <= 0:
                break
            held[piece] -= cut
            total -= cut
            if not held[piece]:
                del held[piece]
    return computed


class _Use(NamedTuple):
    """A use of the end of a piece by a request: the bytes that it adds from one slot to another, by piece."""

    tokens: list[tuple[int, int, int, int]]
    point: tuple[int, int, int, int] | None
    cost: float


def packed(paths: Paths, kind: Kind, budget: int, power: float = 1.0, *, again: bool = False) -> int:
    """Packs uses of restore points, greedily by tokens saved over bytes to the power of `power`. Slot 2 n is the time
    of request n, slot 2 n + 1 the time between it and the next. What a request runs along is held anyway. With `again`
    a point may be made once more by any request that computes its place, which may not begin after it then."""
    count = len(paths.paths)
    free = np.full(2 * count + 1, float(budget))
    apart = np.ones((len(paths.sizes), 2 * count + 1), bool)
    previous: list[dict[int, int]] = []
    passed: dict[int, list[int]] = {}  # the requests along a piece
    kept: dict[int, int] = {}  # the slot up to which the point at the end of a piece is held
    for request, path in enumerate(paths.paths):
        length = paths.ends[path[-1]]
        free[2 * request] -= length * kind.token + kind.point(length)
        previous.append({piece: passed[piece][-1] for piece in path if piece in passed})
        apart[path, 2 * request] = False
        for piece in path:
            passed.setdefault(piece, []).append(request)
            kept.setdefault(piece, 2 * request)
    paid: set[tuple[int, int]] = set()  # a piece whose tokens are held from its previous request to this one

    def use(request: int, way: Sequence[int]) -> _Use:
        tokens = [
            (2 * previous[request][piece] + 1, 2 * request, paths.sizes[piece] * kind.token, piece)
            for piece in way
            if (piece, request) not in paid
        ]
        cost = float(sum(size * (stop - start) for start, stop, size, _ in tokens))
        last, size = way[-1], kind.point(paths.ends[way[-1]])
        if kept[last] >= 2 * request:
            return _Use(tokens, None, cost)
        makers = (2 * each for each in reversed(passed[last]) if each < request and resumed[each] < paths.ends[last])
        point = (max(kept[last], next(makers, 0) if again else 0) + 1, 2 * request, size, last)
        return _Use(tokens, point, cost + size * float(apart[last, point[0] : point[1]].sum()))

    def density(gain: int, cost: float) -> float:
        return -gain / float((cost + 1.0) ** power)

    resumed = [0] * count
    most = [sum(paths.lengths)] * count  # where a request begins at the latest, to make the points of others
    waiting = []
    for request, path in enumerate(paths.paths):
        way: list[int] = []
        for piece in path:
            if piece not in previous[request] or paths.ends[piece] > paths.matched[request]:
                break
            way.append(piece)
            waiting.append((density(paths.ends[piece], use(request, way).cost), request, tuple(way)))
    heapq.heapify(waiting)
    while waiting:
        hoped, request, way_there = heapq.heappop(waiting)
        gain = paths.ends[way_there[-1]] - resumed[request]
        if gain <= 0 or paths.ends[way_there[-1]] >= most[request]:
            continue
        found = use(request, way_there)
        now = density(gain, found.cost)
        if now > hoped * 0.999 and waiting and now > waiting[0][0]:
            heapq.heappush(waiting, (now, request, way_there))
            continue
        need = np.zeros_like(free)
        for start, stop, size, _ in found.tokens:
            need[start:stop] += size
        if found.point:
            start, stop, size, piece = found.point
            need[start:stop] += size * apart[piece, start:stop]
        if (need > np.maximum(free, 0.0)).any():
            continue
        free -= need
        paid.update((piece, request) for *_, piece in found.tokens)
        if found.point:
            start, stop, _, piece = found.point
            if start > kept[piece] + 1:
                most[start // 2] = min(most[start // 2], paths.ends[piece])
            kept[piece] = stop
        resumed[request] = paths.ends[way_there[-1]]
    return sum(paths.lengths) - sum(resumed)


def blocks(requests: Sequence[Request], kind: Kind, budget: int, block: int = 256) -> int:
    """Returns the tokens that a cache of blocks computes, which evicts the least recently used block, the end of a
    sequence first. Windows keep all their tokens. States are kept at the ends of blocks, which are then so long that
    their tokens take as many bytes as a state."""
    if kind.state:
        block = max(block, -(-kind.state // kind.token // block) * block)
    most = budget // (block * (kind.token + kind.window_token) + kind.state)
    held: OrderedDict[int, None] = OrderedDict()
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    computed = 0
    for each in requests:
        whole, length = (*each.prompt, *each.answer), len(each.prompt)
        chain, hits = [0], 0
        for at in range(0, len(whole) - block + 1, block):
            chain.append(names.setdefault((chain[-1], whole[at : at + block]), len(names) + 1))
        while hits + 1 < len(chain) and chain[hits + 1] in held and (hits + 1) * block < length:
            hits += 1
        computed += length - hits * block
        for name in chain[:0:-1]:
            held[name] = None
            held.move_to_end(name)
        while len(held) > most:
            held.popitem(last=False)
    return computed
