"""Copies what is to be written, a piece at a time. Owner: the engine thread."""

from collections.abc import Callable
from time import perf_counter

from runner.cache.disk.thread import DiskThread
from runner.cache.freight import Freight
from runner.cache.load import Load
from runner.cache.trie_cache import TrieCache
from runner.cache.trie_session import TrieSession

_BUSY_S = 0.001
"""The longest that copies hold up what runs, but for the last piece."""
_SHARE = 0.02
"""Of the time that others compute."""
_AT_ONCE = 2
"""Segments that are being copied or written."""
_LONG_TOKENS = 2048
"""A prompt of so many tokens is written while it is read: its host may end the process with its answer."""
_STEP_TOKENS = 256


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
        self._writing = 0
        self._ended_s = clock()
        self._credit_s = 0.0
        self._nothing: tuple[int, bool] | None = None  # when there was nothing to write

    def pending(self, cache: TrieCache, *, idle: bool) -> bool:
        """Returns True if there is something to copy now."""
        if self._disk.fault or self._writing >= _AT_ONCE:
            return False
        if not (self._disk.shelf.listed and self._disk.shelf.may_write):
            return False
        if self._load is not None or cache is not self._cache or self._nothing != (cache.trie.now, idle):
            return True
        return not idle and any(map(_extensible, cache.sequences.sharing))

    def advance(self, cache: TrieCache, *, idle: bool, interrupted: Callable[[], bool]) -> None:
        """Copies for a moment; while the engine is `idle` until `interrupted`, at least one piece."""
        began_s = self._clock()
        if not idle:
            self._credit_s = min(_BUSY_S, self._credit_s + _SHARE * (began_s - self._ended_s))
            if self._credit_s > 0:
                self._extend(cache)
        if idle or self._credit_s > 0:
            until_s = began_s + (_BUSY_S if not idle else 1.0)
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
            self._writing += 1
            self._disk.write(segment, lambda written: self._written(freight, load, written))
        return True

    def _written(self, freight: Freight, load: Load, written: bool) -> None:
        self._writing -= 1
        freight.end(load, written=written)
        self._nothing = None

    def _extend(self, cache: TrieCache) -> None:
        """Puts what running requests with long prompts have computed into the trie, which otherwise learns of it when
        they end. Layers that are not sliceable have nodes wherever they can stand."""
        for session in cache.sequences.sharing:
            if _extensible(session):
                cache.advance_to(session, min(session.position, len(session.recorded)))


def _extensible(session: TrieSession) -> bool:
    return (
        session.total >= _LONG_TOKENS
        and min(session.position, len(session.recorded)) >= session.node.end + _STEP_TOKENS
        and session.sequence.sliceable
        and not session.in_round
        and not session.failed
    )
