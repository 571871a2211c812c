"""The requests that wait for the disk, and the insertion of segments into the trie. Owner: the engine thread."""

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import cast

import mlx.core as mx

from runner.cache.layer_interface import Snapshot
from runner.cache.layers.snapshot import own
from runner.cache.node import Tokens
from runner.cache.sketch import Forward
from runner.cache.trie_cache import TrieCache
from runner.disk.segment import ENTRIES, TAIL, Layers, Record, Segment, SegmentError
from runner.disk.segment_reader import WORTH_TOKENS, FoundSegment, Wanted
from runner.disk.serialize import array_in, array_of, describe, kind_of, restored_snapshot
from runner.disk.thread import DiskThread, Reading
from runner.engine.request import Request
from runner.logs import Log, exception_line, lacks_memory

log = Log(__name__)


def insert_restored(cache: TrieCache, prefix: Tokens, salt: str, segment: Segment) -> bool:
    """Inserts a segment into the trie, as a node that was just used. `prefix` is all tokens up to the segment's end.
    No layer moves: a session restores the layers from the trie later.

    Returns False, and inserts nothing, if the trie lacks the tokens before the segment, or room for the segment. Raises
    SegmentError if the layers differ from the segment's, which the reader has compared before.
    """
    facts, name = segment.facts, segment.name
    if any(describe(cache.sequences.kept.states[int(slot)]) != known for slot, known in facts.layers.items()):
        raise SegmentError("layers")
    root, sequences = cache.trie.root(salt), cache.sequences
    cache.enforcer.touch(cache.trie.match(root, prefix)[0][-1])
    fits = _make_room(cache, segment)
    _, matched = cache.trie.match(root, prefix)  # now, since nodes of the prefix may have been evicted
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
        known = node.slots[slot]
        better = known is None or snapshot.start < known.start  # of a tail, memory may have only the last tokens
        node.slots[slot], spare = (snapshot, known) if better else (known, snapshot)
        if spare is not None:
            spare.close()
    node.restored = True
    if entries:
        node.stored = len(node.tokens)
    node.checkpoint |= facts.checkpoint
    sequences.flush()
    cache.enforcer.touch(node)
    cache.enforce_budget()
    return node.parent is not None


def buffer_like(segment: Segment) -> memoryview:
    """Returns the bytes of a new array as large as this segment. The disk thread reads a later segment into them, which
    then needs no copy: a copy into new memory pages takes several times as long as reading the file."""
    buffer = mx.empty((len(segment.data),), mx.uint8)
    mx.eval(buffer)
    return memoryview(cast("bytes", buffer))


def _make_room(cache: TrieCache, segment: Segment) -> bool:
    """Evicts the least recently used entries until the segment fits. Returns False if it cannot fit."""
    budget_bytes, nbytes = cache.budget_bytes, sum(record.nbytes for record in segment.facts.records)
    if budget_bytes is None:
        return True
    if cache.session_bytes(segment.name.stop) > budget_bytes:
        return False
    if cache.nbytes + nbytes > budget_bytes and cache.sequences.end is not None:
        cache.sequences.evict_kept()  # else the conversation that ran last would stay as a whole
    cache.enforcer.enforce(budget_bytes, cache.reserved_bytes + nbytes, 0)
    return cache.nbytes + nbytes <= budget_bytes


def _arrays(segment: Segment, index: int) -> list[mx.array]:
    """Returns the arrays, not evaluated yet, of the record with this index."""
    parts, buffer = zip(segment.spans(index), segment.facts.records[index].tensors, strict=True), segment.data.obj
    if isinstance(buffer, mx.array):
        return [array_in(buffer, span.start, tensor.dtype, tensor.shape) for span, tensor in parts]
    return [array_of(segment.data[span], tensor.dtype, tensor.shape) for span, tensor in parts]


def _snapshots(cache: TrieCache, segment: Segment, matched: int) -> dict[int, Snapshot]:
    """Returns the snapshots of all records, by slot. Cuts off entries before the offset `matched`."""
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
"""A request waits this long for the disk, even if computing would be faster."""
_NO_TIME_S = 1e-9
_WEIGHT = 0.25  # the share of the latest measurement in the average
_LATE = 2.0  # if the disk returned nothing in time, the average counts this many times the length of the wait
_TIMED_TOKENS, _SHORT_S = (16, 112), 0.02
"""The numbers of tokens of two timed forwards, and a time that is too short to be exact. The second forward runs only
if the first took a shorter time, since a request waits for both."""
_AGAIN = 16  # while the disk is slower than computing, one request in 16 still tries it


class _Restore:
    """A request that waits for the disk, and the segments that were read for the request."""

    def __init__(self, request: Request, wanted: Wanted, began_s: float, token_s: float) -> None:
        self.request = request
        self.held = wanted.held
        self.began_s = began_s
        self.token_s = token_s
        """The seconds that computing a token takes, 0 if unknown."""
        self.reading = Reading(wanted, self._take)
        self.found: deque[FoundSegment] = deque()
        self.ended = False
        """True once the disk thread has reported the end of the reading."""
        self.inserted = False
        """True once a segment is in the trie."""

    @property
    def until_s(self) -> float:
        """The time at which the request has waited for as long as computing the prompt would take."""
        return self.began_s + max(_LEAST_PATIENCE_S, self.token_s * (len(self.request.keys) - self.held))

    def _take(self, found: FoundSegment | None) -> None:
        if found is None:
            self.ended = True
        else:
            self.found.append(found)


class Restores:
    """Lets a request begin once all segments of its prompt are restored, or once the wait has lasted as long as
    computing the prompt would take."""

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
        """`layers` are the forms of the model's layers. If they are empty, nothing is restored. `forward` maps tokens
        [1, L] and a cache list to logits. `prefill_token_s` returns the measured seconds for computing a prompt token,
        or None before enough tokens were computed. Calls `ready` when a request may begin. `shares` lets the disk
        thread read into buffers of MLX arrays."""
        self.count = 0
        """The number of requests with restored tokens."""
        self.tokens = 0
        """The number of restored tokens."""
        self.seconds = 0.0
        """The seconds that requests with restored tokens have waited."""
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
        self._overdue: _Restore | None = None  # the last restore whose wait ended before a segment came
        self._restore_token_s: float | None = None  # the average seconds for restoring a token
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
        """The seconds until the wait of some request ends. None if no request waits."""
        until_s = min((each.until_s for each in self._waiting), default=None)
        return None if until_s is None else max(0.0, until_s - self._clock())

    def add_request(self, request: Request) -> None:
        """Makes a request `restoring` and asks the disk thread for the prompt's segments, if they may save time."""
        keys = array("i", request.keys)
        if not self._layers or self._disk.fault or len(keys) <= WORTH_TOKENS or not self._disk_wins():
            return
        if self._overdue is not None and not self._overdue.ended:
            return  # the disk thread still reads for a request that no longer waits
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
        """Inserts one segment, lets a request begin, or times the model. Returns False if there is nothing to do."""
        now_s = self._clock()
        for restore in self._waiting:
            late = now_s >= restore.until_s
            if late and not (restore.token_s or restore.ended or restore.request.cancelled):
                restore.token_s = self._computing_token_s()
                return True
            if restore.request.cancelled or ((late or restore.ended) and not restore.found):
                self._end(restore, late=late)
                return True
            if restore.found:  # even if `late`: the engine may have been busy since the segments were read
                if late:
                    self._stop_reading(restore)
                self._insert(restore, restore.found.popleft())
                return True
        return False

    def release(self) -> None:
        """Lets all waiting requests begin without the disk."""
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
        except Exception as error:  # the trie may be half changed, so empty it
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
        """Lets a request begin. A request that is `late` and got no tokens counts against the disk's speed."""
        self._waiting.remove(restore)
        self._stop_reading(restore)
        request, keys, tokens = restore.request, restore.reading.wanted.tokens, 0
        if restore.inserted:  # perhaps no tokens: the prompt may part from the segments, or layers lack their ends
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
        """Returns the seconds for computing a token. If no request has shown them yet, times a short forward."""
        known = self._prefill_token_s() or self._sampled_token_s
        if known is None:
            try:
                known = self._time_token()
            except Exception as error:  # a model may raise any error, and would raise it for a request, too
                log.warning("the disk cache does not know how long computing takes", why=exception_line(error))
            self._sampled_token_s = known = known or 0.0
        return known or _NO_TIME_S

    def _time_token(self) -> float:
        """Times a short prompt and, for a fast model, a longer one. Returns the seconds for computing a token."""
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
        """Returns False if restoring a token takes longer than computing it, but for one call in `_AGAIN`."""
        computing_s = self._prefill_token_s()
        if self._restore_token_s is None or computing_s is None or self._restore_token_s < computing_s:
            return True
        self._skipped += 1
        return self._skipped % _AGAIN == 0
