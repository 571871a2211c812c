"""Writes the trie to the disk: what is not there yet, a piece at a time. Owner: the engine thread."""

from array import array
from collections.abc import Callable
from mmap import mmap
from time import perf_counter
from typing import NamedTuple

from runner.cache.layer_interface import Snapshot
from runner.cache.node import Node, spelled
from runner.cache.session import TrieSession
from runner.cache.trie_cache import TrieCache
from runner.disk.segment import (
    ENTRIES,
    MOST_BYTES,
    STATE,
    TAIL,
    DigestOf,
    Facts,
    Name,
    PrefixDigests,
    Record,
    Segment,
    Tensor,
    Tokens,
    UnknownMediaError,
)
from runner.disk.segment_reader import MOST_TOKENS
from runner.disk.serialize import PIECE_BYTES, SerializeError, copy_piece, copy_tokens, describe, kind_of, parts
from runner.disk.store import Index
from runner.disk.thread import DiskThread
from runner.logs import Log

log = Log(__name__)

# --- A segment that is copied out of the layers. Copying stops after every piece of a layer, so that a slice can come
# between. What was copied stays right whatever happens to the layers meanwhile: it is of the same tokens as long as the
# node holds the same snapshot.


class Source(NamedTuple):
    """A record to copy from a snapshot, as long as the node holds it and it is as `live` as it was."""

    snapshot: Snapshot
    live: bool
    record: Record


class SegmentCopy:
    """A segment that is copied, a piece at a time."""

    def __init__(
        self, node: Node, facts: Facts, sources: list[Source], tokens: Tokens, buffer: mmap, *, on_device: bool
    ) -> None:
        """`buffer` is large enough."""
        self.node = node
        self.facts = facts
        self.buffer = buffer
        self.data = memoryview(buffer)[: sum(facts.sizes)]
        self._sources = sources
        self._on_device = on_device
        self._at = 4 * facts.tokens
        self.data[: self._at] = tokens.tobytes()
        self._done = 0
        self._copied = 0  # of the present layer: tokens or, of a state, bytes

    @property
    def segment(self) -> Segment | None:
        """The segment, once all of it is copied."""
        return Segment(self.facts, self.data) if self._done == len(self._sources) else None

    def advance(self) -> bool:
        """Copies the next piece of a layer. Returns False if it is no longer there: then drop the copy."""
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
        """Copies some tokens of a layer. Returns how many it has; None if it has changed."""
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
        """Copies some bytes of a state. Returns how many it has; None if it has changed."""
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


# --- What the trie holds, and the disk does not: one segment at a time, from the root.

_LEAST_TOKENS = 256
_ENTRY_BYTES = 32 << 20
"""The most bytes of a segment of entries."""


class UnsavedSegments:
    """Finds the next segment to write, and knows which are on their way to the disk."""

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
        """`touch` is called with segments that are on disk already. `on_device` is as for `copy_tokens`. The disk may
        hold `most_bytes`; no segment takes more than half of them."""
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
        """The content of a layer that no file can hold; then nothing is written."""
        self.sent: list[SegmentCopy] = []
        """On their way to the disk; they count as stored."""
        self._unsure = False  # True if a part of what counts as stored may be neither on disk nor on its way
        self._held: set[tuple[Node, str]] = set()  # tails and states that are on disk, or cannot be
        self._done: dict[Node, int] = {}  # nodes without anything left to write, and when they were last used
        self._seen: tuple[int, bool] | None = None  # the trie when it was last looked through
        self._waiting: list[tuple[str, Node]] = []  # salt and node, those to look at first last
        self._buffers: list[mmap] = []  # used again: new pages cost several times the copy
        self._points: tuple[Node, int, PrefixDigests] | None = None

    def pending(self, *, idle: bool) -> bool:
        """Returns False if `next` would return None."""
        return not self.refused and (self._seen != (self._cache.trie.now, idle) or bool(self._waiting))

    def next(self, *, idle: bool = True) -> SegmentCopy | None:
        """Returns the next segment to copy; None if there is none for now. Unless the engine is `idle`, states and
        tails that are live in layers wait."""
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
        """Notes that a segment is copied completely, and on its way to the disk."""
        self.sent.append(copy)
        name = copy.facts.name
        if name.kind != ENTRIES:
            self._held.add((copy.node, name.kind))
            return
        for node in copy.node.path()[1:]:  # it may have been split
            if node.start + node.stored >= name.start and node.end > name.start:
                node.stored = max(node.stored, min(name.stop, node.end) - node.start)

    def end(self, copy: SegmentCopy, *, written: bool) -> None:
        """Takes back the buffer of a copy that is on disk (`written`), or was dropped. If one that was sent is not
        written, all that counts as stored is compared with the index again."""
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
        """Returns the nodes to look at, children before their parents: the list is taken from its end."""
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
        """Returns the snapshots of a kind in a node; none unless all layers of this kind have one."""
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
        facts = Facts(name, self._namespace, layers, records, pictures, node.checkpoint and kind != ENTRIES)
        if sum(facts.sizes) > self._most_bytes:
            self._held.add((node, kind))
            return None
        return SegmentCopy(node, facts, sources, tokens, self._buffer(sum(facts.sizes)), on_device=self._on_device)

    def _buffer(self, nbytes: int) -> mmap:
        """Returns a buffer. The system makes its pages as they are written: all at once would be a pause."""
        buffer = self._buffers.pop() if self._buffers else None
        return buffer if buffer is not None and len(buffer) >= nbytes else mmap(-1, max(1, nbytes))

    def _points_of(self, salt: str, node: Node) -> PrefixDigests:
        if self._points is None or self._points[:2] != (node, node.start):
            self._points = node, node.start, PrefixDigests(self._root, salt, spelled(node.path()), self._digest_of)
        return self._points[2]

    def _tokens(self, tokens: Tokens) -> tuple[Tokens, tuple[str, ...]]:
        """Returns tokens with the pictures' names replaced by their places in the list of digests, and that list."""
        places = {name: place for place, name in enumerate(dict.fromkeys(token for token in tokens if token < 0))}
        digests = list[str]()
        for name in places:
            digest = self._digest_of(name)
            if digest is None:
                raise UnknownMediaError(f"item {name}")
            digests.append(digest.hex())
        return array("i", (-1 - places[token] if token < 0 else token for token in tokens)), tuple(digests)


# --- When to write.

_ANSWERING_S, _READING_S = 0.001, 0.1
"""The longest that copies delay answers and prompts, but for the last piece."""
_SHARE = 0.01
"""Of the time that others compute."""
_AT_ONCE, _AT_ONCE_BYTES = 16, 64 << 20
"""The most segments on their way to the disk: one slice may make as many."""
_STEP_TOKENS = 256
"""A running request enters the trie in steps of this many tokens: its host may end the process with the last one."""


class Writer:
    """Writes the trie, from the roots, whenever there is time."""

    def __init__(
        self, cache: TrieCache, disk: DiskThread, unsaved: UnsavedSegments, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.seconds = 0.0
        """The engine's time that this took."""
        self.unsaved = unsaved
        self._cache = cache
        self._disk = disk
        self._clock = clock
        self._copying: SegmentCopy | None = None
        self._ended_s = clock()
        self._credit_s = 0.0

    def pending(self, *, idle: bool) -> bool:
        """Returns True if there is something to copy now."""
        sent = self.unsaved.sent
        if len(sent) >= _AT_ONCE or sum(len(copy.data) for copy in sent) >= _AT_ONCE_BYTES:
            return False
        if self._disk.fault or not (self._disk.store.listed and self._disk.store.may_write):
            return False
        if self._copying is not None or self.unsaved.pending(idle=idle):
            return True
        return not idle and any(map(_extensible, self._cache.sequences.sharing))

    @property
    def writing(self) -> bool:
        """True while segments are on their way to the disk."""
        return bool(self.unsaved.sent) and not self._disk.fault

    def resume(self) -> None:
        """Notes that the engine has something to compute again: no share of the time since is for copies."""
        self._ended_s = self._clock()

    def advance(self, *, idle: bool, interrupted: Callable[[], bool], answering: bool = True) -> None:
        """Copies for a moment, or, while the engine is `idle`, until `interrupted`, at least one piece. `answering`:
        this delays the tokens of answers."""
        began_s = self._clock()
        if not idle:
            most_s = _ANSWERING_S if answering else _READING_S
            self._credit_s = min(most_s, self._credit_s + _SHARE * (began_s - self._ended_s))
            if self._credit_s > 0 and self._copying is None:
                self._extend()
        if idle or self._credit_s > 0:
            until_s = began_s + (self._credit_s if not idle else 1.0)
            while self._copy(idle=idle) and self._clock() < until_s and not interrupted():
                pass
        self._ended_s = self._clock()
        self.seconds += self._ended_s - began_s
        if not idle:
            self._credit_s -= self._ended_s - began_s

    def _copy(self, *, idle: bool) -> bool:
        """Copies the next piece. Returns False if there is none now."""
        if not self.pending(idle=idle):
            return False
        copy = self._copying
        if copy is None:
            self._copying = self.unsaved.next(idle=idle)
            return self._copying is not None
        if not copy.advance():
            self._copying = None
            self.unsaved.end(copy, written=False)
        elif (segment := copy.segment) is not None:
            self._copying = None
            self.unsaved.send(copy)
            self._disk.write(segment, lambda written: self.unsaved.end(copy, written=written))
        return True

    def _extend(self) -> None:
        """Puts into the trie what running requests have computed, which otherwise comes there when they end. Layers
        that are not sliceable have nodes wherever they can stand."""
        for session in self._cache.sequences.sharing:
            if _extensible(session):
                former = session.node
                ahead = min(session.position, len(session.recorded)) - former.end
                self._cache.advance_to(session, former.end + ahead // _STEP_TOKENS * _STEP_TOKENS)
                if former is not self._cache.sequences.end and _is_whole(session, former):
                    self._cache.trie.merge(former)  # every forward looks at all that is live in its layers


def _extensible(session: TrieSession) -> bool:
    return (
        min(session.position, len(session.recorded)) >= session.node.end + _STEP_TOKENS
        and session.sequence.sliceable
        and not session.in_round
        and not session.failed
    )


def _is_whole(session: TrieSession, former: Node) -> bool:
    """Returns True if a node and its child, where a session stands, can be joined without a copy: the layers of the
    session hold both."""
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
