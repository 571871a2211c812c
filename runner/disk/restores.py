"""The requests that wait for what the disk has of their prompts. Owner: the engine thread."""

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import cast

import mlx.core as mx

from runner.cache.layer_interface import Snapshot
from runner.cache.layers.snapshot import own
from runner.cache.node import Tokens
from runner.cache.resume import deepest_offset, shared_tokens
from runner.cache.trie_cache import TrieCache
from runner.disk.check import Sample, SelfCheck
from runner.disk.reader import WORTH_TOKENS, Found, Wanted
from runner.disk.segment import ENTRIES, Facts, Record, Segment, SegmentError
from runner.disk.serialize import adopted, array_in, array_of, describe, is_tail
from runner.disk.thread import DiskThread, Reading
from runner.engine.request import Request
from runner.logs import Log, error_line, lacks_memory

log = Log(__name__)

# --- Puts what another process has computed, read from disk, into the trie. Owner: the engine thread. Nodes are
# made and filled here, and no layer moves: what a prompt can use of them is decided by the trie, as ever.


def standing(cache: TrieCache, tokens: Tokens, salt: str) -> int:
    """Returns the tokens of a prompt that would come from the cache if it began now. Changes nothing."""
    sequences = cache.sequences
    path, matched = cache.trie.match(cache.trie.root(salt), tokens)
    branch = min(matched, len(tokens) - 1)
    if path[-1].start == branch < matched:
        path.pop()
    sequence, end = (sequences.kept, sequences.end) if sequences.idle else (sequences.fresh(), None)
    return deepest_offset(sequence, path, branch, shared_tokens(path, branch, end))[0]


def adopt(cache: TrieCache, prefix: Tokens, salt: str, segment: Segment) -> bool:
    """Puts a segment into the trie. `prefix` are the tokens from the first one to the end of the segment.

    The reader has compared it with the layers. Returns False, and leaves all as it was, if what it follows is not there
    or there is no room for it. Raises SegmentError if a layer is kept in another form by now. Adopted nodes count as
    just used.
    """
    facts, name = segment.facts, segment.name
    _learn(cache, facts)
    nbytes = sum(tensor.nbytes for record in facts.records for tensor in record.tensors)
    fits = _make_room(cache, nbytes)  # first: what it evicts may be a part of the way
    root, sequences = cache.trie.root(salt), cache.sequences
    _, matched = cache.trie.match(root, prefix)
    entries = name.kind == ENTRIES
    if entries and matched >= name.stop:
        return True
    needed = name.start if entries else name.stop if any(state.sliceable for _, state in sequences.kept.used) else 0
    if not fits or matched < needed:
        return False
    held = _snapshots(cache, segment, matched)
    node = cache.trie.advance(root, prefix)[-1]
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
    """Returns the bytes of a new array, as many as this segment has. A segment that is read into it is adopted without
    a copy: new pages cost several times what reading into them does."""
    buffer = mx.empty((len(segment.data),), mx.uint8)
    mx.eval(buffer)
    return memoryview(cast("bytes", buffer))


def _make_room(cache: TrieCache, nbytes: int) -> bool:
    """Evicts what was not used lately until so many bytes fit. Returns False if they cannot."""
    budget_bytes = cache.budget_bytes
    if budget_bytes is None:
        return True
    cache.enforcer.enforce(budget_bytes, cache.reserved_bytes + nbytes, 0)
    return cache.nbytes + nbytes <= budget_bytes


def _learn(cache: TrieCache, facts: Facts) -> None:
    """Learns from another process what the first forward shows: which layers the model uses, which of them count
    something else than tokens, and what a token takes. Until it is known which layers are used, the trie would think
    that none is needed. Raises SegmentError if this process knows better which layers count otherwise."""
    sequences, known = cache.sequences, cache.sequences.facts
    states, distrusted = sequences.kept.states, set[int]()
    for slot, described in facts.layers.items():
        if describe(states[int(slot)]) != described:
            if describe(states[int(slot)], distrusted=True) != described:
                raise SegmentError("layers")
            distrusted.add(int(slot))
    known.used.update(map(int, facts.layers))
    if distrusted:
        known.untrusted.update(distrusted)
        cache.drop_untrusted()
    tokens, nbytes = (
        facts.tokens,
        {record.slot: sum(each.nbytes for each in record.tensors) for record in facts.records},
    )
    if tokens:
        known.token_bytes = known.token_bytes or sum(nbytes.values()) // tokens
        return
    tails = sum(size for slot, size in nbytes.items() if is_tail(states[slot]))
    known.tail_bytes = max(known.tail_bytes, tails)
    known.state_bytes = max(known.state_bytes, sum(nbytes.values()) - tails)


def _arrays(segment: Segment, index: int) -> list[mx.array]:
    """Returns the arrays of a record, not evaluated."""
    tensors, buffer = segment.facts.records[index].tensors, segment.data.obj
    if isinstance(buffer, mx.array):
        spans = zip(segment.spans(index), tensors, strict=True)
        return [array_in(buffer, span.start, tensor.dtype, tensor.shape) for span, tensor in spans]
    parts = zip(segment.arrays(index), tensors, strict=True)
    return [array_of(data, tensor.dtype, tensor.shape) for data, tensor in parts]


def _snapshots(cache: TrieCache, segment: Segment, matched: int) -> dict[int, Snapshot]:
    """Returns the snapshots of all records, by slot; of entries, those from `matched` on."""
    held: dict[int, Snapshot] = {}
    states, found = cache.sequences.kept.states, list[tuple[Record, int, list[mx.array]]]()
    try:
        for index, record in enumerate(segment.facts.records):
            start, arrays = record.start, _arrays(segment, index)
            if states[record.slot].sliceable and start < matched:
                arrays, start = [own(array[..., matched - start :, :]) for array in arrays], matched
            found.append((record, start, arrays))
        mx.eval([arrays for _, _, arrays in found])  # at once: each evaluation takes a while, whatever its size
        for record, start, arrays in found:
            state = states[record.slot]
            held[record.slot] = adopted(state, start, segment.name.stop, arrays, record.content)
    except BaseException:
        for snapshot in held.values():
            snapshot.close()
        raise
    return held


_LEAST_PATIENCE_S = 0.1
"""The longest wait for the disk that is always allowed."""
_NO_TIME_S = 1e-9
_WEIGHT = 0.25  # of the latest measurement in an average
_LATE = 2.0  # times what has passed: what the disk is taken for that has brought nothing until then
_AGAIN = 16  # requests: one in so many is tried although the disk was slower than computing


class _Restore:
    """A request, and what was read for it."""

    def __init__(self, request: Request, held: int, began_s: float) -> None:
        self.request, self.held, self.began_s = request, held, began_s
        self.token_s = 0.0
        """The seconds that computing a token takes, as far as that is known."""
        self.found: deque[Found] = deque()
        self.adopted = False
        """True if something of it is in memory now."""
        self.last: Found | None = None
        """The last segment of it that can be checked."""
        self.ended = False
        """True if nothing more will be read."""
        self.reading: Reading | None = None

    @property
    def until_s(self) -> float:
        """When it has waited for as long as computing takes."""
        return self.began_s + max(_LEAST_PATIENCE_S, self.token_s * (len(self.request.keys) - self.held))


class Restores:
    """Lets a request begin once the disk has nothing more for it. It waits no longer than computing would take."""

    def __init__(
        self,
        disk: DiskThread,
        salt: str,
        check: SelfCheck,
        make_sample: Callable[[], Sample],
        *,
        prefill_token_s: Callable[[], float | None],
        ready: Callable[[], None],
        shares: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`make_sample` is called when something is looked for. `prefill_token_s` returns the seconds that computing a
        token takes; None if no request has shown it. `ready` is called when a request may begin. With `shares` the disk
        thread reads into memory of the device."""
        self.count = 0
        """The requests for which something was restored."""
        self.tokens = 0
        """The tokens restored so far."""
        self.seconds = 0.0
        """The time that requests have waited for them."""
        self._disk, self._salt, self._check = disk, salt, check
        self._prefill_token_s, self._ready, self._shares, self._clock = prefill_token_s, ready, shares, clock
        self._make_sample = make_sample
        self._sample: Sample | None = None
        self._sampled_token_s: float | None = None
        self._waiting: list[_Restore] = []
        self._overdue: _Restore | None = None  # the last one that has waited in vain
        self._token_s: float | None = None
        self._skipped = 0

    @property
    def pending(self) -> bool:
        """True if there is something to do at once."""
        now_s = self._clock()
        return any(
            each.found or each.ended or each.request.cancelled or now_s >= each.until_s for each in self._waiting
        )

    @property
    def patience_s(self) -> float | None:
        """The seconds until a request has waited long enough; None if none waits."""
        until_s = min((each.until_s for each in self._waiting), default=None)
        return None if until_s is None else max(0.0, until_s - self._clock())

    def add(self, cache: TrieCache, request: Request) -> None:
        """Looks for the prompt of a request on disk, if that may be worth it: the request is `restoring` then."""
        keys = array("i", request.keys)
        if self._disk.fault or len(keys) <= WORTH_TOKENS or not self._disk_wins():
            return
        if self._overdue is not None and not self._overdue.ended:
            return  # the disk thread still waits for what this request has given up
        if self._disk.shelf.listed and not self._disk.shelf.index.names:
            return
        held = standing(cache, keys, self._salt)
        if len(keys) - 1 < held + WORTH_TOKENS:
            return
        if self._sample is None:
            self._sample = self._make_sample()
        if not self._sample.layers:
            return
        states = cache.sequences.kept.states
        tails = [state for state in states if is_tail(state)]
        wanted = Wanted(
            keys,
            self._salt,
            held,
            lambda at: min((state.needs(at) for state in tails), default=max(0, at - 1)),
            self._sample.layers,
        )
        restore = _Restore(request, held, self._clock())
        restore.token_s = self._prefill_token_s() or self._sampled_token_s or 0.0
        restore.reading = Reading(wanted, lambda found: self._take(restore, found))
        request.restoring = True
        self._waiting.append(restore)
        self._disk.read(restore.reading)

    def advance(self, cache: TrieCache) -> bool:
        """Adopts one segment, or lets a request begin. Returns False if there is nothing to do."""
        now_s = self._clock()
        for restore in self._waiting:
            late = now_s >= restore.until_s
            if late and not (restore.token_s or restore.ended or restore.request.cancelled):
                restore.token_s = self._computing_token_s()
                return True
            if restore.request.cancelled or ((late or restore.ended) and not restore.found):
                self._end(cache, restore, late=late)
                return True
            if restore.found:  # what was read in time counts, however long the engine has looked elsewhere
                if late:
                    self._stop_reading(restore)
                self._adopt(cache, restore, restore.found.popleft())
                return True
        return False

    def release(self) -> None:
        """Lets all requests begin at once."""
        for restore in self._waiting:
            restore.request.restoring = False
        self._waiting.clear()
        self._ready()

    def _take(self, restore: _Restore, found: Found | None) -> None:
        if found is None:
            restore.ended = True
        else:
            restore.found.append(found)

    def _adopt(self, cache: TrieCache, restore: _Restore, found: Found) -> None:
        name, buffer = found.segment.name, None
        more = name.kind == ENTRIES and 2 * name.stop - name.start < len(restore.request.keys)
        try:
            fits = adopt(cache, found.prefix, self._salt, found.segment)
            if fits and more and self._shares:
                buffer = buffer_like(found.segment)
        except SegmentError as error:
            self._disk.reject(name, error.reason)
            fits = False
        except Exception as error:  # the trie may be half changed: begin anew, as if it could not be resumed
            log.exception("cache freed: what is on disk could not be adopted")
            cache.detach()
            if not lacks_memory(error):
                self._disk.reject(name, "layers")
            fits = False
        if not fits:
            restore.found.clear()
            self._end(cache, restore, late=False)
            return
        restore.adopted = True
        if self._check.suits(found):
            restore.last = found
        if restore.reading is not None:
            self._disk.adopted(restore.reading, buffer)

    def _stop_reading(self, restore: _Restore) -> None:
        if restore.reading is not None and not restore.ended:
            restore.reading.dropped = True
            self._disk.adopted(restore.reading)

    def _end(self, cache: TrieCache, restore: _Restore, *, late: bool) -> None:
        """Lets a request begin. If nothing came before it was `late`, the disk counts as slower than computing."""
        self._waiting.remove(restore)
        self._stop_reading(restore)
        keys, tokens = array("i", restore.request.keys), 0
        if restore.adopted:  # the prompt may part from them, or layers be unable to stand there
            tokens = restore.request.restored = max(0, standing(cache, keys, self._salt) - restore.held)
        seconds = self._clock() - restore.began_s
        if tokens:
            self._measured(seconds / tokens)
            self.count, self.tokens, self.seconds = self.count + 1, self.tokens + tokens, self.seconds + seconds
            if restore.last is not None:
                self._check.sample(restore.last)
            log.info(
                "restored from disk",
                request=restore.request.number,
                tokens=tokens,
                milliseconds=round(seconds * 1e3, 1),
            )
        elif late and not restore.request.cancelled:
            if self._overdue is None:
                log.warning(
                    "the disk cache is slow: computing instead",
                    request=restore.request.number,
                    milliseconds=round(seconds * 1e3, 1),
                )
            self._overdue = restore
            self._measured(_LATE * seconds / (len(keys) - restore.held))
        restore.request.restoring = False
        self._ready()

    def _computing_token_s(self) -> float:
        """Returns the seconds that computing a token takes. If no request has shown it, computes for a moment."""
        known = self._prefill_token_s() or self._sampled_token_s
        if known is None and self._sample is not None:
            try:
                known = self._sample.token_s(self._clock)
            except Exception as error:  # models raise anything; a request would have met it, too
                log.warning("the disk cache does not know how long computing takes", why=error_line(error))
            self._sampled_token_s = known = known or 0.0
        return known or _NO_TIME_S

    def _measured(self, token_s: float) -> None:
        self._token_s = token_s if self._token_s is None else self._token_s + (token_s - self._token_s) * _WEIGHT

    def _disk_wins(self) -> bool:
        """Returns True unless restoring a token took longer lately than computing one."""
        computing = self._prefill_token_s()
        if self._token_s is None or computing is None or self._token_s < computing:
            return True
        self._skipped += 1
        return self._skipped % _AGAIN == 0
