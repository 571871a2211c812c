"""Decides when to copy segments from the trie for the disk. Owner: the engine thread."""

from collections.abc import Callable
from time import perf_counter

from runner.cache.node import Node
from runner.cache.session import TrieSession
from runner.cache.trie_cache import TrieCache
from runner.disk.thread import DiskThread
from runner.disk.unsaved import SegmentCopy, UnsavedSegments

_ANSWERING_S, _READING_S = 0.001, 0.1
"""The most seconds for copies between two slices, while answers are generated, and while only prompts are computed. The
last piece may exceed them."""
_SHARE = 0.01
"""The time for copies while requests are computed, as a share of the time of the slices."""
_AT_ONCE, _AT_ONCE_BYTES = 16, 64 << 20
"""Copying waits while this many segments, or segments of this many bytes, are on their way to the disk."""
_STEP_TOKENS = 256
"""A running request's tokens enter the trie in steps of this many, since a host may kill the process right after the
last token of an answer."""


class Writer:
    """Copies segments from the trie and sends them to the disk thread, whenever there is time."""

    def __init__(
        self, cache: TrieCache, disk: DiskThread, unsaved: UnsavedSegments, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.seconds = 0.0
        """The seconds that the engine thread has spent on copies."""
        self.unsaved = unsaved
        self._cache = cache
        self._disk = disk
        self._clock = clock
        self._copying: SegmentCopy | None = None
        self._ended_s = clock()
        self._credit_s = 0.0

    def pending(self, *, idle: bool) -> bool:
        """Returns True if `write_some` has something to do now."""
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
        """Restarts the clock of the share of copies, so that idle time before a request earns no time for copies."""
        self._ended_s = self._clock()

    def write_some(self, *, idle: bool, interrupted: Callable[[], bool], answering: bool = True) -> None:
        """Copies as long as the share of copies allows. While the engine is `idle`, copies at least one piece and goes
        on until `interrupted`, for a second at most. Set `answering` if answers wait meanwhile."""
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
        """Starts the next copy, or copies the next piece. Returns False if there is nothing to copy."""
        if not self.pending(idle=idle):
            return False
        copy = self._copying
        if copy is None:
            self._copying = self.unsaved.next_copy(idle=idle)
            return self._copying is not None
        if not copy.copy_next():
            self._copying = None
            self.unsaved.end(copy, written=False)
        elif (segment := copy.segment) is not None:
            self._copying = None
            self.unsaved.send(copy)
            self._disk.write(segment, lambda written: self.unsaved.end(copy, written=written))
        return True

    def _extend(self) -> None:
        """Puts the computed tokens of running requests into the trie, which otherwise gets them when a request ends.
        Does so only for sliceable layers: other layers get nodes while they compute."""
        for session in self._cache.sequences.sharing:
            if _extensible(session):
                former = session.node
                ahead = min(session.position, len(session.recorded)) - former.end
                self._cache.advance_to(session, former.end + ahead // _STEP_TOKENS * _STEP_TOKENS)
                if former is not self._cache.sequences.end and _is_whole(session, former):
                    self._cache.trie.merge(former)  # since every forward visits all live snapshots of its layers


def _extensible(session: TrieSession) -> bool:
    return (
        min(session.position, len(session.recorded)) >= session.node.end + _STEP_TOKENS
        and session.sequence.sliceable
        and not session.in_round
        and not session.failed
    )


def _is_whole(session: TrieSession, former: Node) -> bool:
    """Returns True if the node `former` and its child, where the session stands, can be joined without a copy: the
    session's layers hold the snapshots of both."""
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
