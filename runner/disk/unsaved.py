"""The next segment to write, and the copy of its bytes from the trie's snapshots. Owner: the engine thread."""

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
    """A record, and the snapshot from which it is copied. The copy fails once the node holds another snapshot, or the
    snapshot's `live` differs from this one."""

    snapshot: Snapshot
    live: bool
    record: Record


class SegmentCopy:
    """A copy of a segment, made a piece at a time. Slices of requests may run between two pieces: copied bytes stay
    right for the segment's tokens as long as the node holds the same snapshots."""

    def __init__(
        self, node: Node, facts: SegmentFacts, sources: list[Source], tokens: Tokens, buffer: mmap, *, on_device: bool
    ) -> None:
        """`buffer` must be at least as large as the segment."""
        self.node = node
        self.facts = facts
        self.buffer = buffer
        self.data = memoryview(buffer)[: sum(facts.sizes)]
        self._sources = sources
        self._on_device = on_device
        self._at = 4 * facts.tokens
        self.data[: self._at] = tokens.tobytes()
        self._done = 0
        self._copied = 0  # the copied tokens of the present record or, for a state, the copied bytes

    @property
    def segment(self) -> Segment | None:
        """The segment, or None until it is copied completely."""
        return Segment(self.facts, self.data) if self._done == len(self._sources) else None

    def copy_next(self) -> bool:
        """Copies the next piece. Returns False if a snapshot has changed. The whole copy is useless then."""
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
        """Copies some tokens of a record. Returns the number of the record's tokens, or None if its arrays changed."""
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
        """Copies some bytes of a state. Returns the number of the state's bytes, or None if the state has changed."""
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
    """Finds the next segment that the trie holds and the disk lacks, nodes near the root first. Keeps the list of
    segments that are on their way to the disk."""

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
        """Calls `touch` with segments that are on disk already. `on_device` is as for `copy_tokens`. `most_bytes` is
        the bound of the disk cache. A segment has at most half of that, or half of MOST_BYTES."""
        self._cache = cache
        self._index = index
        self._namespace = namespace
        self._root = root
        self._digest_of = digest_of
        self._touch = touch
        self._on_device = on_device
        self._most_bytes = min(MOST_BYTES, most_bytes) // 2
        self.least = _LEAST_TOKENS
        """The fewest tokens of a conversation that is written."""
        self.refused = ""
        """The type of a layer's value that no file can hold. Unless it is empty, nothing is written."""
        self.sent: list[SegmentCopy] = []
        """The copies on their way to the disk. Their tokens count as stored."""
        self._unsure = False  # True after a failed write: tokens that count as stored may be lost
        self._held: set[tuple[Node, str]] = set()  # node and kind of tails and states on disk, or too large for it
        self._done: dict[Node, int] = {}  # completely written node -> the node's `used` at that time
        self._seen: tuple[int, bool] | None = None  # the trie's clock, and `idle`, at the last scan
        self._waiting: list[tuple[str, Node]] = []  # (salt, node) of nodes to look at, the last one first
        self._buffers: list[mmap] = []  # kept for later copies: new memory pages take longer than the copy
        self._points: tuple[Node, int, PrefixDigests] | None = None

    def pending(self, *, idle: bool) -> bool:
        """Returns False if `next_copy` would return None."""
        return not self.refused and (self._seen != (self._cache.trie.now, idle) or bool(self._waiting))

    def next_copy(self, *, idle: bool = True) -> SegmentCopy | None:
        """Returns the next segment to copy, if there is one. Unless `idle`, skips states and tails that are live."""
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
                log.warning("the disk cache cannot keep prompts of this model", why=f"a layer holds {self.refused}")
            if copy is not None:
                return copy
            self._waiting.pop()
        return None

    def send(self, copy: SegmentCopy) -> None:
        """Records that a segment is on its way to the disk. The copy must be complete."""
        self.sent.append(copy)
        name = copy.facts.name
        if name.kind != ENTRIES:
            self._held.add((copy.node, name.kind))
            return
        for node in copy.node.path()[1:]:  # the node may have been split since the copy began
            if node.start + node.stored >= name.start and node.end > name.start:
                node.stored = max(node.stored, min(name.stop, node.end) - node.start)

    def end(self, copy: SegmentCopy, *, written: bool) -> None:
        """Ends a copy, whose buffer is free again. `written` says that the segment is on disk. If writing failed,
        compares all tokens that count as stored with the index again, at the next scan."""
        self._buffers.append(copy.buffer)
        sent = copy in self.sent
        if sent:
            self.sent.remove(copy)
        if not written:
            self._seen = None
            self._unsure = self._unsure or sent

    def pending_tokens(self) -> int:
        """Returns the number of tokens in the trie that are not on disk."""
        nodes = self._cache.trie.nodes()
        sent = sum(copy.facts.tokens for copy in self.sent)
        return sent + sum(len(node.tokens) - node.stored * (not self._unsure) for node in nodes)

    def _scan(self) -> list[tuple[str, Node]]:
        """Returns the salt and node of all nodes to look at, parents after their children."""
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
        """Returns (slot, snapshot) for a node's layers of this kind. Empty if one of these layers has no snapshot."""
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
                return None  # until the engine is idle
        self._done[node] = node.used
        if not has_entries:
            node.stored = len(node.tokens)
        return None

    def _skip_stored(self, node: Node, points: PrefixDigests) -> None:
        """Counts as stored the tokens of a node that are on disk already."""
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
        """Returns a used buffer that is large enough, or a new one, whose memory the system provides piece by piece."""
        buffer = self._buffers.pop() if self._buffers else None
        return buffer if buffer is not None and len(buffer) >= nbytes else mmap(-1, max(1, nbytes))

    def _points_of(self, salt: str, node: Node) -> PrefixDigests:
        if self._points is None or self._points[:2] != (node, node.start):
            self._points = node, node.start, PrefixDigests(self._root, salt, spelled(node.path()), self._digest_of)
        return self._points[2]

    def _tokens(self, tokens: Tokens) -> tuple[Tokens, tuple[str, ...]]:
        """Returns the tokens with -1 - k for the k-th picture, as in a file, and the digests of the pictures. Raises
        UnknownMediaError."""
        places = {name: place for place, name in enumerate(dict.fromkeys(token for token in tokens if token < 0))}
        digests = list[str]()
        for name in places:
            digest = self._digest_of(name)
            if digest is None:
                raise UnknownMediaError(f"item {name}")
            digests.append(digest.hex())
        return array("i", (-1 - places[token] if token < 0 else token for token in tokens)), tuple(digests)
