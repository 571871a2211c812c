"""The next segment to write, and its copy out of the layers. Owner: the engine thread."""

from array import array
from collections.abc import Callable
from mmap import mmap
from typing import NamedTuple

from runner.cache.layer_interface import Snapshot
from runner.cache.node import Node, spelled
from runner.cache.trie_cache import TrieCache
from runner.disk.points import DigestOf, PrefixDigests, Tokens, UnknownMediaError
from runner.disk.segment import ENTRIES, MOST_BYTES, STATE, TAIL, Name, Record, Segment, SegmentFacts, Tensor
from runner.disk.segment_reader import MOST_TOKENS
from runner.disk.serialize import PIECE_BYTES, SerializeError, copy_piece, copy_tokens, describe, kind_of, parts
from runner.disk.store import Index
from runner.logs import Log

log = Log(__name__)


class Source(NamedTuple):
    """A record to copy from a snapshot, while the node holds it and its `live` has not changed."""

    snapshot: Snapshot
    live: bool
    record: Record


class SegmentCopy:
    """A segment that is copied, a piece at a time.

    Slices of requests may come between two pieces. A copied piece stays right whatever happens to the layers: it
    belongs to the same tokens while the node holds the same snapshot."""

    def __init__(
        self, node: Node, facts: SegmentFacts, sources: list[Source], tokens: Tokens, buffer: mmap, *, on_device: bool
    ) -> None:
        """`buffer` holds at least the bytes of the segment."""
        self.node = node
        self.facts = facts
        self.buffer = buffer
        self.data = memoryview(buffer)[: sum(facts.sizes)]
        self._sources = sources
        self._on_device = on_device
        self._at = 4 * facts.tokens
        self.data[: self._at] = tokens.tobytes()
        self._done = 0
        self._copied = 0  # tokens of the present layer or, of a state, bytes

    @property
    def segment(self) -> Segment | None:
        """The segment once it is copied completely; None before."""
        return Segment(self.facts, self.data) if self._done == len(self._sources) else None

    def copy_next(self) -> bool:
        """Copies the next piece of a layer. Returns False if the piece is gone: then drop the copy."""
        snapshot, live, record = self._sources[self._done]
        slots = self.node.slots
        if record.slot >= len(slots) or slots[record.slot] is not snapshot or snapshot.live != live:
            return False
        total = self._advance_state(snapshot, record) if record.content else self._advance_tokens(snapshot, record)
        if total is None:
            return False
        if self._copied >= total:
            self._at += record.nbytes
            self._done += 1
            self._copied = 0
        return True

    def _advance_tokens(self, snapshot: Snapshot, record: Record) -> int | None:
        """Copies some tokens of a layer. Returns the number of its tokens; None if it has changed."""
        start, tensors = record.start, record.tensors
        count = self.facts.name.stop - start
        first = self._copied
        stop = min(count, first + max(1, PIECE_BYTES * count // max(1, record.nbytes)))
        found, _ = parts(snapshot, start + first, start + stop)
        shapes = [(each.dtype, (*each.shape[:-2], stop - first, each.shape[-1])) for each in tensors]
        if [(part.dtype, part.shape) for part in found] != shapes:
            return None
        at = self._at
        for part, tensor in zip(found, tensors, strict=True):
            into = self.data[at : at + tensor.nbytes]
            copy_tokens(part, into, first, count, on_device=self._on_device)
            at += tensor.nbytes
        self._copied = stop
        return count

    def _advance_state(self, snapshot: Snapshot, record: Record) -> int | None:
        """Copies some bytes of a state. Returns the number of its bytes; None if it has changed."""
        found, content = parts(snapshot, record.start, self.facts.name.stop)
        shapes = [(each.dtype, each.shape) for each in record.tensors]
        if content != record.content or [(part.dtype, part.shape) for part in found] != shapes:
            return None
        begin = 0
        for part, tensor in zip(found, record.tensors, strict=True):
            end = begin + tensor.nbytes
            if self._copied < end:
                into = self.data[self._at + begin : self._at + end]
                self._copied = begin + copy_piece(part.array, into, self._copied - begin, on_device=self._on_device)
                break
            begin = end
        return record.nbytes


_LEAST_TOKENS = 256
_ENTRY_BYTES = 32 << 20
"""The most bytes of a segment of entries."""


class UnsavedSegments:
    """Finds the next segment that the trie holds and the disk does not, from the root, and counts the segments that are
    on their way to the disk."""

    def __init__(
        self,
        cache: TrieCache,
        index: Index,
        namespace: str,
        root: bytes,
        *,
        digest_of: DigestOf = lambda _: None,
        touch: Callable[[Name], None] = lambda _: None,
        on_device: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Calls `touch` with segments that are on disk already. `on_device` is as for `copy_tokens`. The disk may hold
        `most_bytes`; no segment takes more than half of that."""
        self._cache = cache
        self._index = index
        self._namespace = namespace
        self._root = root
        self._digest_of = digest_of
        self._touch = touch
        self._on_device = on_device
        self._most_bytes = min(MOST_BYTES, most_bytes) // 2
        self.least = _LEAST_TOKENS
        """The fewest tokens of a conversation that is worth a file."""
        self.refused = ""
        """The content of a layer that no file can hold. If there is any, nothing is written."""
        self.sent: list[SegmentCopy] = []
        """The copies on their way to the disk. They count as stored."""
        self._unsure = False  # True if tokens that count as stored may be neither on disk nor on their way
        self._held: set[tuple[Node, str]] = set()  # tails and states that are on disk, or too large for it
        self._done: dict[Node, int] = {}  # nodes that are written completely, and their last use
        self._seen: tuple[int, bool] | None = None  # the trie's clock, and `idle`, at the last scan
        self._waiting: list[tuple[str, Node]] = []  # salt and node; the next one is the last
        self._buffers: list[mmap] = []  # to use again: new pages cost several times the copy
        self._points: tuple[Node, int, PrefixDigests] | None = None

    def pending(self, *, idle: bool) -> bool:
        """Returns False if `next_copy` would return None."""
        return not self.refused and (self._seen != (self._cache.trie.now, idle) or bool(self._waiting))

    def next_copy(self, *, idle: bool = True) -> SegmentCopy | None:
        """Returns the next segment to copy; None if there is none now. States and tails that are live in layers wait
        until the engine is `idle`."""
        mark = self._cache.trie.now, idle
        if self._seen != mark:
            self._seen = mark
            self._waiting = self._scan()
        while self._waiting and not self.refused:
            salt, node = self._waiting[-1]
            copy = None
            try:
                if node.parent is not None:
                    copy = self._next_of(salt, node, idle)
            except UnknownMediaError:
                self._done[node] = node.used
            except SerializeError as error:
                self.refused = str(error)
                log.warning("this model is not kept on disk", why=f"a layer holds {self.refused}")
            if copy is not None:
                return copy
            self._waiting.pop()
        return None

    def send(self, copy: SegmentCopy) -> None:
        """Records that a segment is copied completely and on its way to the disk."""
        self.sent.append(copy)
        name = copy.facts.name
        if name.kind != ENTRIES:
            self._held.add((copy.node, name.kind))
            return
        for node in copy.node.path()[1:]:  # it may have been split
            if node.start + node.stored >= name.start and node.end > name.start:
                node.stored = max(node.stored, min(name.stop, node.end) - node.start)

    def end(self, copy: SegmentCopy, *, written: bool) -> None:
        """Takes back the buffer of a copy that is on disk (`written`), or was dropped. After a sent copy that was not
        written, everything that counts as stored is compared with the index again."""
        self._buffers.append(copy.buffer)
        sent = copy in self.sent
        if sent:
            self.sent.remove(copy)
        if not written:
            self._seen = None
            self._unsure = self._unsure or sent

    def pending_tokens(self) -> int:
        """Returns the tokens in the trie that are not on disk."""
        nodes = self._cache.trie.nodes()
        sent = sum(copy.facts.tokens for copy in self.sent)
        return sent + sum(len(node.tokens) - node.stored * (not self._unsure) for node in nodes)

    def _scan(self) -> list[tuple[str, Node]]:
        """Returns the nodes to look at, from the last to the first: children stand before their parents."""
        found = list[tuple[str, Node]]()
        for salt, root in self._cache.trie.roots.items():
            waiting = [*root.children.values()]
            while waiting:
                node = waiting.pop()
                waiting.extend(node.children.values())
                found.append((salt, node))
        if self._unsure:
            self._unsure = False
            self._held = set()
            self._done = {}
            for _, node in found:
                node.stored = 0
        nodes = {node for _, node in found}
        self._held = {each for each in self._held if each[0] in nodes}
        self._done = {node: used for node, used in self._done.items() if node in nodes}
        long = set[Node]()
        for _, node in reversed(found):
            if node.end >= self.least or any(child in long for child in node.children.values()):
                long.add(node)
        return [each for each in reversed(found) if each[1] in long and self._done.get(each[1]) != each[1].used]

    def _slots(self, node: Node, kind: str) -> list[tuple[int, Snapshot]]:
        """Returns the snapshots of a kind in a node; none if a layer of this kind lacks one."""
        wanted = [slot for slot, state in self._cache.sequences.kept.used if kind_of(state) == kind]
        held = [(slot, node.slots[slot]) for slot in wanted if slot < len(node.slots)]
        found = [(slot, snapshot) for slot, snapshot in held if snapshot is not None]
        return found if len(found) == len(wanted) else []

    def _next_of(self, salt: str, node: Node, idle: bool) -> SegmentCopy | None:
        points = self._points_of(salt, node)
        has_entries = any(state.sliceable for _, state in self._cache.sequences.kept.used)
        if has_entries:
            self._skip_stored(node, points)
        if has_entries and node.stored < len(node.tokens):
            start = node.start + node.stored
            nbytes = min(_ENTRY_BYTES, self._most_bytes // 2)
            most = max(1, min(MOST_TOKENS, nbytes // max(1, self._cache.sequences.facts.token_bytes)))
            return self._copy_of(node, points, ENTRIES, start, min(node.end, start + most))
        for kind in (TAIL, STATE):
            held = self._slots(node, kind)
            if not held or (node, kind) in self._held:
                continue
            known = self._index.held(kind, points.at(node.end))
            if known is not None:
                self._touch(known)
                self._held.add((node, kind))
            elif idle or not any(snapshot.live for _, snapshot in held):
                return self._copy_of(node, points, kind, min(snapshot.start for _, snapshot in held), node.end)
            else:
                return None  # later
        self._done[node] = node.used
        if not has_entries:
            node.stored = len(node.tokens)
        return None

    def _skip_stored(self, node: Node, points: PrefixDigests) -> None:
        """Marks the tokens of a node that are on disk already."""
        while node.stored < len(node.tokens):
            at = node.start + node.stored
            found = [each for each in self._index.after(points.at(at)) if each.stop <= node.end]
            known = next((each for each in found if points.at(each.stop) == each.last), None)
            if known is None:
                return
            self._touch(known)
            node.stored = known.stop - node.start

    def _copy_of(self, node: Node, points: PrefixDigests, kind: str, start: int, stop: int) -> SegmentCopy | None:
        sequence, sources = self._cache.sequences.kept, list[Source]()
        layers = {str(slot): describe(state) for slot, state in sequence.used}
        if not all(layers.values()):
            raise SerializeError("what nobody knows")
        for slot, snapshot in self._slots(node, kind):
            low = start if kind == ENTRIES else snapshot.start
            found, content = parts(snapshot, low, stop)
            tensors = tuple(Tensor(part.dtype, part.shape) for part in found)
            sources.append(Source(snapshot, snapshot.live, Record(slot, low, tensors, content)))
        if not sources:
            return None
        tokens, pictures = self._tokens(points.tokens[start:stop]) if kind == ENTRIES else (array("i"), ())
        last = points.at(stop)
        name = Name(points.at(start) if kind == ENTRIES else last, last, start, stop, kind)
        records = tuple(source.record for source in sources)
        facts = SegmentFacts(name, self._namespace, layers, records, pictures, node.checkpoint and kind != ENTRIES)
        if sum(facts.sizes) > self._most_bytes:
            self._held.add((node, kind))
            return None
        return SegmentCopy(node, facts, sources, tokens, self._buffer(sum(facts.sizes)), on_device=self._on_device)

    def _buffer(self, nbytes: int) -> mmap:
        """Returns a buffer. The system makes its pages while they are written; all at once would be a pause."""
        buffer = self._buffers.pop() if self._buffers else None
        return buffer if buffer is not None and len(buffer) >= nbytes else mmap(-1, max(1, nbytes))

    def _points_of(self, salt: str, node: Node) -> PrefixDigests:
        if self._points is None or self._points[:2] != (node, node.start):
            self._points = node, node.start, PrefixDigests(self._root, salt, spelled(node.path()), self._digest_of)
        return self._points[2]

    def _tokens(self, tokens: Tokens) -> tuple[Tokens, tuple[str, ...]]:
        """Returns the tokens, with the names of pictures replaced by their places in the list of digests, and that
        list."""
        places = {name: place for place, name in enumerate(dict.fromkeys(token for token in tokens if token < 0))}
        digests = list[str]()
        for name in places:
            digest = self._digest_of(name)
            if digest is None:
                raise UnknownMediaError(f"item {name}")
            digests.append(digest.hex())
        return array("i", (-1 - places[token] if token < 0 else token for token in tokens)), tuple(digests)
