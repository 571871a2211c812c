"""Copies what is to be written, a piece at a time. Owner: the engine thread."""

from array import array
from collections.abc import Callable
from mmap import mmap
from time import perf_counter
from typing import NamedTuple

from runner.cache.layer_interface import Snapshot
from runner.cache.node import Node, spelled
from runner.cache.session import TrieSession
from runner.cache.trie_cache import TrieCache
from runner.disk.index import MOST_TOKENS, Index
from runner.disk.segment import (
    ENTRIES,
    MOST_BYTES,
    STATE,
    TAIL,
    DigestOf,
    Facts,
    Name,
    Points,
    Record,
    Segment,
    Tensor,
    Tokens,
    UnknownPictureError,
)
from runner.disk.serialize import PIECE_BYTES, CargoError, copy_piece, copy_tokens, describe, is_tail, parts
from runner.disk.thread import DiskThread
from runner.logs import Log

log = Log(__name__)

# --- A segment that is being copied out of the layers. Owner: the engine thread. Copying stops after every piece of
# a layer, so that a slice can come between. What was copied stays right whatever happens to the layers meanwhile:
# it is of the same tokens as long as the node holds the same snapshot.


class Source(NamedTuple):
    """A record to copy: a snapshot, as long as the node holds it."""

    slot: int
    snapshot: Snapshot
    live: bool
    start: int
    record: Record


class Load:
    """A segment that is being copied, a piece at a time."""

    def __init__(
        self, node: Node, facts: Facts, sources: list[Source], tokens: Tokens, buffer: mmap, *, on_device: bool
    ) -> None:
        """`buffer` is large enough."""
        self.node, self.buffer = node, buffer
        self._facts, self._sources, self._on_device = facts, sources, on_device
        self._data = memoryview(buffer)[: sum(facts.sizes)]
        self._at = 4 * facts.tokens
        self._data[: self._at] = tokens.tobytes()
        self._done = 0
        self._copied = 0  # of the present layer: tokens or, of a state, bytes

    @property
    def name(self) -> Name:
        """The name of the segment."""
        return self._facts.name

    @property
    def tokens(self) -> int:
        """The number of its tokens; those of a tail or a state are not repeated."""
        return self._facts.tokens

    @property
    def segment(self) -> Segment | None:
        """The segment, once all of it is copied."""
        return Segment(self._facts, self._data) if self._done == len(self._sources) else None

    def advance(self) -> bool:
        """Copies the next piece of a layer. Returns False if it is no longer there: the load is to be dropped."""
        slot, snapshot, live, _, record = source = self._sources[self._done]
        slots = self.node.slots
        if slot >= len(slots) or slots[slot] is not snapshot or snapshot.live != live:
            return False
        total = self._advance_state(source) if record.content else self._advance_tokens(source)
        if total is None:
            return False
        if self._copied >= total:
            self._at += _bytes_of(record)
            self._done, self._copied = self._done + 1, 0
        return True

    def _advance_tokens(self, source: Source) -> int | None:
        """Copies some tokens of a layer. Returns how many it has; None if it has changed."""
        start, tensors = source.start, source.record.tensors
        count = self._facts.name.stop - start
        first = self._copied
        stop = min(count, first + max(1, PIECE_BYTES * count // max(1, _bytes_of(source.record))))
        found, _ = parts(source.snapshot, start + first, start + stop)
        shapes = [(each.dtype, (*each.shape[:-2], stop - first, each.shape[-1])) for each in tensors]
        if [(part.dtype, part.shape) for part in found] != shapes:
            return None
        at = self._at
        for part, tensor in zip(found, tensors, strict=True):
            into = self._data[at : at + tensor.nbytes]
            copy_tokens(part, into, first, count, on_device=self._on_device)
            at += tensor.nbytes
        self._copied = stop
        return count

    def _advance_state(self, source: Source) -> int | None:
        """Copies some bytes of a state. Returns how many it has; None if it has changed."""
        record = source.record
        found, content = parts(source.snapshot, source.start, self._facts.name.stop)
        shapes = [(each.dtype, each.shape) for each in record.tensors]
        if content != record.content or [(part.dtype, part.shape) for part in found] != shapes:
            return None
        begin = 0
        for part, tensor in zip(found, record.tensors, strict=True):
            end = begin + tensor.nbytes
            if self._copied < end:
                into = self._data[self._at + begin : self._at + end]
                self._copied = begin + copy_piece(part.array, into, self._copied - begin, on_device=self._on_device)
                break
            begin = end
        return _bytes_of(record)


def _bytes_of(record: Record) -> int:
    return sum(tensor.nbytes for tensor in record.tensors)


# --- Takes what the trie holds, and the disk does not, out of it: one segment at a time, from the root. Owner: the
# engine thread.

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


_ANSWERING_S, _READING_S = 0.001, 0.1
"""The longest that copies hold up what runs, but for the last piece: answers; prompts."""
_SHARE = 0.01
"""Of the time that others compute."""
_AT_ONCE, _AT_ONCE_BYTES = 16, 64 << 20
"""The most segments that are on their way to the disk; they may be as many as one slice makes."""
_STEP_TOKENS = 256
"""A running request enters the trie in steps of this many tokens: its host may end the process with the last one."""


class Writes:
    """Writes the trie, from the roots, whenever there is time."""

    def __init__(
        self, disk: DiskThread, make_freight: Callable[[], Freight], clock: Callable[[], float] = perf_counter
    ) -> None:
        """`make_freight` is called for every new cache."""
        self.seconds = 0.0
        """The engine's time that this took."""
        self._disk, self._make_freight, self._clock = disk, make_freight, clock
        self.freight: Freight | None = None
        self._cache: TrieCache | None = None
        self._load: Load | None = None
        self._writing: list[int] = []  # the bytes of the segments that are on their way to the disk
        self._ended_s = clock()
        self._credit_s = 0.0
        self._nothing: tuple[int, bool] | None = None  # when there was nothing to write

    def pending(self, cache: TrieCache, *, idle: bool) -> bool:
        """Returns True if there is something to copy now."""
        if self._disk.fault or len(self._writing) >= _AT_ONCE or sum(self._writing) >= _AT_ONCE_BYTES:
            return False
        if not (self._disk.shelf.listed and self._disk.shelf.may_write):
            return False
        if self._load is not None or cache is not self._cache or self._nothing != (cache.trie.now, idle):
            return True
        return not idle and any(map(_extensible, cache.sequences.sharing))

    @property
    def writing(self) -> bool:
        """True while segments are on their way to the disk."""
        return bool(self._writing)

    def resume(self) -> None:
        """Notes that the engine has something to compute again: no share of the time since is for copies."""
        self._ended_s = self._clock()

    def advance(self, cache: TrieCache, *, idle: bool, interrupted: Callable[[], bool], answering: bool = True) -> None:
        """Copies for a moment; while the engine is `idle` until `interrupted`, at least one piece. `answering`: there
        are answers whose tokens come late for it."""
        began_s = self._clock()
        if not idle:
            most_s = _ANSWERING_S if answering else _READING_S
            self._credit_s = min(most_s, self._credit_s + _SHARE * (began_s - self._ended_s))
            if self._credit_s > 0 and self._load is None:
                self._extend(cache)
        if idle or self._credit_s > 0:
            until_s = began_s + (self._credit_s if not idle else 1.0)
            while self._copy(cache, idle=idle) and self._clock() < until_s and not interrupted():
                pass
        self._ended_s = self._clock()
        self.seconds += self._ended_s - began_s
        if not idle:
            self._credit_s -= self._ended_s - began_s

    def _copy(self, cache: TrieCache, *, idle: bool) -> bool:
        """Copies the next piece. Returns False if there is none now."""
        if cache is not self._cache:
            self._cache, self._load, self.freight = cache, None, self._make_freight()
        freight = self.freight
        if freight is None or not self.pending(cache, idle=idle):
            return False
        if self._load is None:
            self._load = freight.next(cache, idle=idle)
            if self._load is None:
                self._nothing = cache.trie.now, idle
            return self._load is not None
        load = self._load
        if not load.advance():
            self._load = None
            freight.end(load, written=False)
        elif (segment := load.segment) is not None:
            self._load = None
            self._writing.append(len(segment.data))
            freight.sent(load)
            self._disk.write(segment, lambda written: self._written(freight, load, written, len(segment.data)))
        return True

    def _written(self, freight: Freight, load: Load, written: bool, nbytes: int) -> None:
        self._writing.remove(nbytes)
        freight.end(load, written=written)
        self._nothing = None

    def _extend(self, cache: TrieCache) -> None:
        """Puts what running requests have computed into the trie, which otherwise learns of it when they end. Layers
        that are not sliceable have nodes wherever they can stand."""
        for session in cache.sequences.sharing:
            if _extensible(session):
                former = session.node
                ahead = min(session.position, len(session.recorded)) - former.end
                cache.advance_to(session, former.end + ahead // _STEP_TOKENS * _STEP_TOKENS)
                if former is not cache.sequences.end and _is_whole(session, former):
                    cache.trie.merge(former)  # every forward looks at all that is live in its layers


def _extensible(session: TrieSession) -> bool:
    return (
        min(session.position, len(session.recorded)) >= session.node.end + _STEP_TOKENS
        and session.sequence.sliceable
        and not session.in_round
        and not session.failed
    )


def _is_whole(session: TrieSession, former: Node) -> bool:
    """Returns True if a node and its child, where a session stands, are one, and the layers of the session hold both:
    then nothing is copied to join them."""
    node = session.node
    return (
        former.parent is not None
        and not former.checkpoint
        and former.only_child() is node
        and former.locks == node.locks
        and all(
            (held := each.slots[slot]) is not None and held in state.live
            for slot, state in session.sequence.used
            for each in (former, node)
        )
    )
