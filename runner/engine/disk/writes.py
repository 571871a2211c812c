"""Copies what is to be written, a piece at a time. Owner: the engine thread."""

from collections.abc import Callable
from time import perf_counter

from runner.cache.disk.thread import DiskThread
from runner.cache.freight import Freight
from runner.cache.load import Load
from runner.cache.node import Node
from runner.cache.trie_cache import TrieCache
from runner.cache.trie_session import TrieSession

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
