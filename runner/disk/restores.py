"""Restores: the requests that wait for the disk, and the way of a segment into the trie. Owner: the engine thread."""

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import cast

import mlx.core as mx

from runner.cache.layer_interface import Snapshot
from runner.cache.layers.snapshot import own
from runner.cache.node import Tokens
from runner.cache.trie_cache import TrieCache
from runner.disk.segment import ENTRIES, TAIL, Layers, Record, Segment, SegmentError
from runner.disk.segment_reader import WORTH_TOKENS, FoundSegment, Wanted
from runner.disk.serialize import array_in, array_of, describe, kind_of, restored_snapshot
from runner.disk.thread import DiskThread, Reading
from runner.engine.request import Request
from runner.logs import Log, exception_line, lacks_memory
from runner.model.weights.dtype import Forward

log = Log(__name__)


def insert_restored(cache: TrieCache, prefix: Tokens, salt: str, segment: Segment) -> bool:
    """Puts a segment, which the reader has compared with the layers, into the trie, as a node that was just used.
    `prefix` are all tokens up to its end. No layer moves: the trie decides what a prompt can use.

    Returns False, and changes nothing, if the trie lacks the tokens before the segment, or room for it. Raises
    SegmentError if a layer has another form by now.
    """
    facts, name = segment.facts, segment.name
    if any(describe(cache.sequences.kept.states[int(slot)]) != known for slot, known in facts.layers.items()):
        raise SegmentError("layers")
    nbytes = sum(record.nbytes for record in facts.records)
    fits = _make_room(cache, nbytes)  # first, since it may evict nodes on the way
    root, sequences = cache.trie.root(salt), cache.sequences
    _, matched = cache.trie.match(root, prefix)
    entries = name.kind == ENTRIES
    if entries and matched >= name.stop:
        return True
    needed = name.start if entries else name.stop if any(state.sliceable for _, state in sequences.kept.used) else 0
    if not fits or matched < needed:
        return False
    held = _snapshots(cache, segment, matched)
    node = cache.trie.extend(root, prefix)[-1]
    node.slots = node.slots or [None] * len(sequences.kept.states)
    for slot, snapshot in held.items():
        if node.slots[slot] is None:
            node.slots[slot] = snapshot
        else:
            snapshot.close()
    node.restored = True
    if entries:
        node.stored = len(node.tokens)
    node.checkpoint |= facts.checkpoint
    sequences.flush()
    cache.enforcer.touch(node)
    cache.enforce_budget()
    return node.parent is not None


def buffer_like(segment: Segment) -> memoryview:
    """Returns the bytes of a new array of the size of this segment. A segment that is read into them enters the trie
    without a copy, into new pages that would cost several times the reading."""
    buffer = mx.empty((len(segment.data),), mx.uint8)
    mx.eval(buffer)
    return memoryview(cast("bytes", buffer))


def _make_room(cache: TrieCache, nbytes: int) -> bool:
    """Evicts the least recently used entries until `nbytes` fit. Returns False if they cannot."""
    budget_bytes = cache.budget_bytes
    if budget_bytes is None:
        return True
    cache.enforcer.enforce(budget_bytes, cache.reserved_bytes + nbytes, 0)
    return cache.nbytes + nbytes <= budget_bytes


def _arrays(segment: Segment, index: int) -> list[mx.array]:
    """Returns the lazy arrays of a record."""
    parts, buffer = zip(segment.spans(index), segment.facts.records[index].tensors, strict=True), segment.data.obj
    if isinstance(buffer, mx.array):
        return [array_in(buffer, span.start, tensor.dtype, tensor.shape) for span, tensor in parts]
    return [array_of(segment.data[span], tensor.dtype, tensor.shape) for span, tensor in parts]


def _snapshots(cache: TrieCache, segment: Segment, matched: int) -> dict[int, Snapshot]:
    """Returns the snapshots of all records, by slot. Entries begin at `matched`."""
    held: dict[int, Snapshot] = {}
    states, found = cache.sequences.kept.states, list[tuple[Record, int, list[mx.array]]]()
    try:
        for index, record in enumerate(segment.facts.records):
            start, arrays = record.start, _arrays(segment, index)
            if states[record.slot].sliceable and start < matched:
                arrays, start = [own(array[..., matched - start :, :]) for array in arrays], matched
            found.append((record, start, arrays))
        mx.eval([arrays for _, _, arrays in found])  # together, since each evaluation has a fixed cost
        for record, start, arrays in found:
            state = states[record.slot]
            held[record.slot] = restored_snapshot(state, start, segment.name.stop, arrays, record.content)
    except BaseException:
        for snapshot in held.values():
            snapshot.close()
        raise
    return held


_LEAST_PATIENCE_S = 0.1
"""The longest wait for the disk that is always allowed."""
_NO_TIME_S = 1e-9
_WEIGHT = 0.25  # of the latest measurement in an average
_LATE = 2.0  # times the wait: the assumed time of a disk that has returned nothing
_TIMED_TOKENS, _SHORT_S = (16, 112), 0.02
"""The tokens of the forwards that are timed. A shorter time than this shows little, so the second one is for a fast
model only: a request that arrives waits for it."""
_AGAIN = 16  # the disk is tried for one in 16 requests, even if it was slower than computing


class _Restore:
    """A request that waits, and the segments that were read for it."""

    def __init__(self, request: Request, wanted: Wanted, began_s: float, token_s: float) -> None:
        self.request = request
        self.held = wanted.held
        self.began_s = began_s
        self.token_s = token_s
        """The seconds for computing a token; 0 if unknown."""
        self.reading = Reading(wanted, self._take)
        self.found: deque[FoundSegment] = deque()
        self.ended = False
        """True once the last segment is read."""
        self.inserted = False
        """True once a segment is in the trie."""

    @property
    def until_s(self) -> float:
        """The time at which it has waited for as long as computing takes."""
        return self.began_s + max(_LEAST_PATIENCE_S, self.token_s * (len(self.request.keys) - self.held))

    def _take(self, found: FoundSegment | None) -> None:
        if found is None:
            self.ended = True
        else:
            self.found.append(found)


class Restores:
    """Lets a request begin once the disk has nothing more for it. No request waits longer than computing would take."""

    def __init__(
        self,
        cache: TrieCache,
        disk: DiskThread,
        salt: str,
        layers: Layers,
        forward: Forward,
        *,
        prefill_token_s: Callable[[], float | None],
        ready: Callable[[], None],
        shares: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`layers` are the forms of the model's layers; without any, nothing is restored. `forward` maps tokens [1, L]
        and a cache list to logits. `prefill_token_s` returns the seconds for computing a token; None before a request
        has shown them. Calls `ready` when a request may begin. With `shares` the disk thread reads into memory of the
        device."""
        self.count = 0
        """The number of requests with restored tokens."""
        self.tokens = 0
        """The number of restored tokens."""
        self.seconds = 0.0
        """The time that these requests have waited."""
        self._cache = cache
        self._disk = disk
        self._salt = salt
        self._layers = layers
        self._forward = forward
        self._prefill_token_s = prefill_token_s
        self._ready = ready
        self._shares = shares
        self._clock = clock
        self._sampled_token_s: float | None = None
        self._waiting: list[_Restore] = []
        self._overdue: _Restore | None = None  # the last restore that was too late
        self._restore_token_s: float | None = None  # an average
        self._skipped = 0

    @property
    def pending(self) -> bool:
        """True if `take_next` has something to do."""
        now_s = self._clock()
        return any(
            each.found or each.ended or each.request.cancelled or now_s >= each.until_s for each in self._waiting
        )

    @property
    def patience_s(self) -> float | None:
        """The seconds until a request has waited long enough; None if none waits."""
        until_s = min((each.until_s for each in self._waiting), default=None)
        return None if until_s is None else max(0.0, until_s - self._clock())

    def add_request(self, request: Request) -> None:
        """Looks for the prompt of a request on disk, if that may be worth it, and makes the request `restoring`."""
        keys = array("i", request.keys)
        if not self._layers or self._disk.fault or len(keys) <= WORTH_TOKENS or not self._disk_wins():
            return
        if self._overdue is not None and not self._overdue.ended:
            return  # the disk thread is still busy with a reading that its request has given up
        if self._disk.store.listed and not self._disk.store.index.names:
            return
        held = self._cache.reusable_tokens(keys, self._salt)
        if len(keys) - 1 < held + WORTH_TOKENS:
            return
        tails = [state for state in self._cache.sequences.kept.states if kind_of(state) == TAIL]

        def needs(at: int) -> int:
            return min((state.needs(at) for state in tails), default=max(0, at - 1))

        wanted = Wanted(keys, self._salt, held, needs, self._layers)
        token_s = self._prefill_token_s() or self._sampled_token_s or 0.0
        restore = _Restore(request, wanted, self._clock(), token_s)
        request.restoring = True
        self._waiting.append(restore)
        self._disk.look_for(restore.reading)

    def take_next(self) -> bool:
        """Takes one segment, or lets a request begin. Returns False if there is nothing to do."""
        now_s = self._clock()
        for restore in self._waiting:
            late = now_s >= restore.until_s
            if late and not (restore.token_s or restore.ended or restore.request.cancelled):
                restore.token_s = self._computing_token_s()
                return True
            if restore.request.cancelled or ((late or restore.ended) and not restore.found):
                self._end(restore, late=late)
                return True
            if restore.found:  # segments that were read in time count, even if the engine was busy since
                if late:
                    self._stop_reading(restore)
                self._insert(restore, restore.found.popleft())
                return True
        return False

    def release(self) -> None:
        """Lets all requests begin at once."""
        for restore in self._waiting:
            restore.request.restoring = False
        self._waiting.clear()
        self._ready()

    def _insert(self, restore: _Restore, found: FoundSegment) -> None:
        name, buffer = found.segment.name, None
        more = name.kind == ENTRIES and 2 * name.stop - name.start < len(restore.request.keys)
        fits = False
        try:
            fits = insert_restored(self._cache, found.prefix, self._salt, found.segment)
            if fits and more and self._shares:
                buffer = buffer_like(found.segment)
        except SegmentError as error:
            self._disk.reject(name, error.reason)
        except Exception as error:  # the trie may be half changed: begin anew
            log.exception("cache freed: tokens from disk could not be used")
            self._cache.detach()
            if not lacks_memory(error):
                self._disk.reject(name, "layers")
            fits = False
        if not fits:
            self._end(restore, late=False)
            return
        restore.inserted = True
        self._disk.taken(restore.reading, buffer)

    def _stop_reading(self, restore: _Restore) -> None:
        if not restore.ended:
            self._disk.drop(restore.reading)

    def _end(self, restore: _Restore, *, late: bool) -> None:
        """Lets a request begin. If it is `late` and has no segment, the disk counts as slower than computing."""
        self._waiting.remove(restore)
        self._stop_reading(restore)
        request, keys, tokens = restore.request, restore.reading.wanted.tokens, 0
        if restore.inserted:  # the prompt may part from the segments, or no layer stand at their ends
            tokens = request.restored = max(0, self._cache.reusable_tokens(keys, self._salt) - restore.held)
        seconds = self._clock() - restore.began_s
        milliseconds = round(seconds * 1e3, 1)
        if tokens:
            self._measured(seconds / tokens)
            self.count += 1
            self.tokens += tokens
            self.seconds += seconds
            log.info("restored from disk", request=request.number, tokens=tokens, milliseconds=milliseconds)
        elif late and not request.cancelled:
            if self._overdue is None:
                log.warning(
                    "the disk cache is slow: computing instead", request=request.number, milliseconds=milliseconds
                )
            self._overdue = restore
            self._measured(_LATE * seconds / (len(keys) - restore.held))
        request.restoring = False
        self._ready()

    def _computing_token_s(self) -> float:
        """Returns the seconds for computing a token. If no request has shown them, computes for a moment."""
        known = self._prefill_token_s() or self._sampled_token_s
        if known is None:
            try:
                known = self._time_token()
            except Exception as error:  # a model may raise any; a request would have met it, too
                log.warning("the disk cache does not know how long computing takes", why=exception_line(error))
            self._sampled_token_s = known = known or 0.0
        return known or _NO_TIME_S

    def _time_token(self) -> float:
        """Returns the seconds for computing a token of a short prompt, or of a longer one if the model is fast. Raises
        the errors of MLX."""
        layers, seconds, count = self._cache.sequences.facts.make(), 0.0, 0
        for count in _TIMED_TOKENS:
            logits = self._forward(mx.arange(count)[None], layers)
            began_s = self._clock()
            mx.eval(logits)
            seconds = self._clock() - began_s
            if seconds >= _SHORT_S:
                break
        return seconds / count

    def _measured(self, token_s: float) -> None:
        former_s = token_s if self._restore_token_s is None else self._restore_token_s
        self._restore_token_s = former_s + (token_s - former_s) * _WEIGHT

    def _disk_wins(self) -> bool:
        """Returns True unless restoring a token has lately taken longer than computing it."""
        computing_s = self._prefill_token_s()
        if self._restore_token_s is None or computing_s is None or self._restore_token_s < computing_s:
            return True
        self._skipped += 1
        return self._skipped % _AGAIN == 0
