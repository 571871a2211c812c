"""Checks now and then what was restored: a part of it is computed again while the engine is idle.

The name of the directory says everything that is known to shape keys and values. This finds what is not known: a
driver or a library that computes something else than it did, and answers that would be plausible nonsense. Owner: the
engine thread.
"""

import random
from collections.abc import Callable, Generator

import mlx.core as mx

from runner.cache.disk.reader import Found
from runner.cache.disk.thread import DiskThread
from runner.cache.recheck import is_plain, recheck
from runner.cache.trie_cache import TrieCache
from runner.logs import Log, error_line

log = Log(__name__)
_SHARE = 1 / 64
"""Of the restored requests."""
_MOST_TOKENS, _MOST_BYTES = 2048, 32 << 20
"""The longest prefix that is computed again, and the largest segment that is kept for it."""
_MOST_TRIES = 3
_LIMIT = 0.5
"""The largest difference that is taken for rounding. Other forward boundaries cost up to 0.1 in bfloat16; vectors of
other positions or heads are off by 1 and more."""


class SelfCheck:
    """Computes one segment at a time, slice by slice. If it is not what was restored, the files of this model and all
    that is cached are dropped."""

    def __init__(
        self,
        disk: DiskThread,
        make_layers: Callable[[], list[object]],
        forward: Callable[[mx.array, list[object]], mx.array],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`forward` takes tokens [1, L] and a cache list to logits; `chance` returns a random number from 0 to 1."""
        self.count = self.failures = 0
        """The segments compared so far, and those of them that were wrong."""
        self._disk, self._make_layers, self._forward, self._chance = disk, make_layers, forward, chance
        self._found: Found | None = None
        self._slices: Generator[None, None, float] | None = None
        self._tries = 0

    @property
    def pending(self) -> bool:
        """True if there is something to compute when the engine is idle."""
        return self._found is not None

    @staticmethod
    def suits(found: Found) -> bool:
        """Returns True for a segment that can be checked: of text, short and small enough, and of layers that hold the
        same however long the forwards were."""
        facts, data = found.segment
        if facts.name.stop > _MOST_TOKENS or len(data) > _MOST_BYTES or min(found.prefix, default=-1) < 0:
            return False
        return any(is_plain(facts.layers[str(record.slot)]) for record in facts.records)

    def sample(self, found: Found) -> None:
        """Learns of a restored segment that suits; most are let go."""
        if self._found is None and self._chance() < _SHARE:
            self._found, self._tries = found, 0

    def give_way(self) -> None:
        """Frees the layers, as a request has arrived. The check begins again later, but not forever."""
        if self._slices is None:
            return
        self._drop_layers()
        self._tries += 1
        if self._tries == _MOST_TRIES:
            self._found = None

    def advance(self, cache: TrieCache) -> None:
        """Computes one slice. The engine is idle."""
        found = self._found
        if found is None:
            return
        try:
            if self._slices is None:
                bound = cache.budget_bytes
                if bound is not None and cache.nbytes + cache.session_bytes(found.segment.name.stop) > bound:
                    self._found = None  # nothing is evicted for this
                    return
                self._slices = recheck(found.segment, found.prefix, self._make_layers, self._forward)
            next(self._slices)
        except StopIteration as end:
            self._end(cache, found, end.value)
        except Exception as error:  # models raise anything; a request would have met it, too
            log.warning("the disk cache cannot be checked", why=error_line(error))
            self._forget()

    def _end(self, cache: TrieCache, found: Found, off: float) -> None:
        self._forget()
        self.count += 1
        if off <= _LIMIT:
            return
        self.failures += 1
        log.warning(
            "the disk cache is wrong: emptied", difference=round(off, 2), file=found.segment.name.file,
            why="what it holds is not what this machine computes",
        )  # fmt: skip
        self._disk.empty()
        cache.detach()

    def _forget(self) -> None:
        self._found = None
        self._drop_layers()

    def _drop_layers(self) -> None:
        self._slices = None
        mx.clear_cache()
