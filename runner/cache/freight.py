"""Takes what the trie holds, and the disk does not, out of it: one segment at a time, from the root. Owner: the engine
thread.
"""

from array import array
from collections.abc import Callable
from mmap import mmap

from runner.cache.disk.index import Index
from runner.cache.disk.name import ENTRIES, STATE, TAIL, Name
from runner.cache.disk.plan import MOST_TOKENS
from runner.cache.disk.point import DigestOf, Points, UnknownPictureError
from runner.cache.disk.segment import MOST_BYTES, Facts, Record, Tensor
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.cargo import CargoError, describe, is_tail, parts
from runner.cache.load import Load, Source
from runner.cache.node import Node, Tokens, spelled
from runner.cache.trie_cache import TrieCache
from runner.logs import Log

log = Log(__name__)
_LEAST_TOKENS = 256
_ENTRY_BYTES = 32 << 20
"""The most bytes of a segment of entries."""


class Freight:
    """Finds what to write next."""

    def __init__(
        self,
        index: Index,
        namespace: str,
        root: bytes,
        *,
        digest_of: DigestOf = lambda _: None,
        touch: Callable[[Name], None] = lambda _: None,
        on_device: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`touch` learns of segments that are there already. `on_device` is as for `copy_tokens`. `most_bytes` is what
        the disk may hold; no segment takes more than half of it."""
        self._index, self._namespace, self._root = index, namespace, root
        self._digest_of, self._touch, self._on_device = digest_of, touch, on_device
        self._most_bytes = min(MOST_BYTES, most_bytes) // 2
        self._held: set[tuple[Node, str]] = set()  # tails and states that are on disk, or cannot be
        self._done: dict[Node, int] = {}  # when the nodes of which nothing is left to write were last used
        self._seen: tuple[int, bool] | None = None
        self._waiting: list[tuple[str, Node]] = []
        self._buffers: list[mmap] = []  # used again: new pages cost several times the copy
        self._points: tuple[Node, int, Points] | None = None
        self._sent_tokens = 0  # on their way to the disk
        self._unsure = False  # True if not all that counts as stored is on disk, or on its way
        self.least = _LEAST_TOKENS
        """The fewest tokens of a conversation that is worth a file."""
        self.refused = ""
        """What layers hold that no file can; then nothing is written."""

    def next(self, cache: TrieCache, *, idle: bool = True) -> Load | None:
        """Returns the next segment to copy; None if there is none for now. Unless the engine is `idle`, states and
        tails that are live in layers wait."""
        if self.refused:
            return None
        mark = cache.trie.now, idle
        if self._seen != mark:
            self._seen, self._waiting = mark, self._scan(cache)
        while self._waiting:
            salt, node = self._waiting[-1]
            load, used = None, node.used
            try:
                if node.parent is not None:
                    load = self._next_of(cache, salt, node, idle)
            except UnknownPictureError:
                self._done[node] = used
            except CargoError as error:
                self.refused = str(error)
                log.warning("this model is not kept on disk", why=f"a layer holds {self.refused}")
                return None
            if load is not None:
                return load
            self._waiting.pop()
        return None

    def sent(self, load: Load) -> None:
        """Notes that a segment, all of which is copied, is on its way to the disk: it counts as stored."""
        name = load.name
        self._sent_tokens += load.tokens
        if name.kind != ENTRIES:
            self._held.add((load.node, name.kind))
            return
        for node in load.node.path()[1:]:  # it may have been split
            if node.start + node.stored >= name.start and node.end > name.start:
                node.stored = max(node.stored, min(name.stop, node.end) - node.start)

    def end(self, load: Load, *, written: bool) -> None:
        """Takes back the buffer of a load, which is on disk if it is `written`. Unless it is, all that counts as stored
        is compared with the index again."""
        self._buffers.append(load.buffer)
        if load.segment is not None:
            self._sent_tokens -= load.tokens
        if not written:
            self._seen, self._unsure = None, self._unsure or load.segment is not None

    def pending_tokens(self, cache: TrieCache) -> int:
        """Returns the tokens in the trie that are not on disk."""
        nodes = cache.trie.nodes()
        return self._sent_tokens + sum(len(node.tokens) - node.stored * (not self._unsure) for node in nodes)

    def _scan(self, cache: TrieCache) -> list[tuple[str, Node]]:
        """Returns the nodes to look at, children before their parents, as the list is taken from its end."""
        facts, found, nodes = cache.sequences.facts, list[tuple[str, Node]](), set[Node]()
        if not facts.used:
            return []
        for salt, root in cache.trie.roots.items():
            waiting = [*root.children.values()]
            while waiting:
                node = waiting.pop()
                nodes.add(node)
                waiting.extend(node.children.values())
                found.append((salt, node))
        if self._unsure:
            self._unsure = False
            self._held, self._done = set(), {}
            for node in nodes:
                node.stored = 0
        self._held = {each for each in self._held if each[0] in nodes}
        self._done = {node: used for node, used in self._done.items() if node in nodes}
        long = set[Node]()
        for _, node in reversed(found):
            if node.end >= self.least or any(child in long for child in node.children.values()):
                long.add(node)
        wanted = [(salt, node) for salt, node in found if node in long and self._done.get(node) != node.used]
        return wanted[::-1]

    def _lacks_entries(self, cache: TrieCache, node: Node) -> bool:
        return node.stored < len(node.tokens) and any(state.sliceable for _, state in cache.sequences.kept.used)

    def _slots(self, cache: TrieCache, node: Node, kind: str) -> list[tuple[int, Snapshot]]:
        """Returns the snapshots of a kind in a node; none unless all layers of this kind have one."""
        wanted = [
            slot
            for slot, state in cache.sequences.kept.used
            if (ENTRIES if state.sliceable else TAIL if is_tail(state) else STATE) == kind
        ]
        held = [(slot, node.slots[slot]) for slot in wanted if slot < len(node.slots)]
        found = [(slot, snapshot) for slot, snapshot in held if snapshot is not None]
        return found if len(found) == len(wanted) else []

    def _next_of(self, cache: TrieCache, salt: str, node: Node, idle: bool) -> Load | None:
        points = self._points_of(salt, node)
        if self._lacks_entries(cache, node):
            self._skip_stored(node, points)
        if self._lacks_entries(cache, node):
            held = self._slots(cache, node, ENTRIES)
            start = node.start + node.stored
            nbytes = min(_ENTRY_BYTES, self._most_bytes // 2)
            most = max(1, min(MOST_TOKENS, nbytes // max(1, cache.sequences.facts.token_bytes)))
            return self._load(cache, node, points, ENTRIES, (start, min(node.end, start + most)), held)
        for kind in (TAIL, STATE):
            held = self._slots(cache, node, kind)
            if not held or (node, kind) in self._held:
                continue
            known = self._index.held(kind, points.at(node.end))
            if known is not None:
                self._touch(known)
                self._held.add((node, kind))
            elif idle or not any(snapshot.live for _, snapshot in held):
                start = min(snapshot.start for _, snapshot in held)
                return self._load(cache, node, points, kind, (start, node.end), held)
            else:
                return None  # later
        self._done[node] = node.used
        if not any(state.sliceable for _, state in cache.sequences.kept.used):
            node.stored = len(node.tokens)
        return None

    def _skip_stored(self, node: Node, points: Points) -> None:
        """Marks the tokens of a node that are on disk already."""
        while node.stored < len(node.tokens):
            at = node.start + node.stored
            found = [each for each in self._index.after(points.at(at)) if each.stop <= node.end]
            known = next((each for each in found if points.at(each.stop) == each.last), None)
            if known is None:
                return
            self._touch(known)
            node.stored = known.stop - node.start

    def _load(
        self,
        cache: TrieCache,
        node: Node,
        points: Points,
        kind: str,
        span: tuple[int, int],
        held: list[tuple[int, Snapshot]],
    ) -> Load | None:
        if not held:
            return None
        states, (start, stop) = cache.sequences.kept.states, span
        layers = {str(slot): describe(state) for slot, state in cache.sequences.kept.used}
        if not all(layers.values()):
            raise CargoError("what nobody knows")
        sources = []
        for slot, snapshot in held:
            low = start if states[slot].sliceable else snapshot.start
            found, content = parts(snapshot, low, stop)
            tensors = tuple(Tensor(part.dtype, part.shape) for part in found)
            sources.append(Source(slot, snapshot, snapshot.live, low, Record(slot, low, tensors, content)))
        tokens, pictures = self._tokens(points.tokens[start:stop]) if kind == ENTRIES else (array("i"), ())
        last = points.at(stop)
        name = Name(points.at(start) if kind == ENTRIES else last, last, start, stop, kind)
        records = tuple(source.record for source in sources)
        facts = Facts(name, self._namespace, layers, records, pictures, node.checkpoint and kind != ENTRIES)
        if sum(facts.sizes) > self._most_bytes:
            self._held.add((node, kind))
            return None
        return Load(node, facts, sources, tokens, self._buffer(sum(facts.sizes)), on_device=self._on_device)

    def _buffer(self, nbytes: int) -> mmap:
        """Returns a buffer, whose pages the system makes as they are written: all at once would be a pause."""
        buffer = self._buffers.pop() if self._buffers else None
        return buffer if buffer is not None and len(buffer) >= nbytes else mmap(-1, max(1, nbytes))

    def _points_of(self, salt: str, node: Node) -> Points:
        if self._points is None or self._points[:2] != (node, node.start):
            self._points = node, node.start, Points(self._root, salt, spelled(node.path()), self._digest_of)
        return self._points[2]

    def _tokens(self, tokens: Tokens) -> tuple[Tokens, tuple[str, ...]]:
        """Returns tokens with the pictures' names replaced by their places in the list of digests, and that list."""
        if min(tokens) >= 0:
            return tokens, ()
        places: dict[int, int] = {}
        for token in tokens:
            if token < 0:
                places.setdefault(token, len(places))
        digests = [self._digest_of(name) for name in places]
        if None in digests:
            raise UnknownPictureError("a picture")
        return (
            array("i", (token if token >= 0 else -1 - places[token] for token in tokens)),
            tuple(digest.hex() for digest in digests if digest is not None),
        )
