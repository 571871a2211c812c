"""Prefix caches: what was computed for one prompt serves the next.

`make_cache` chooses by name; a cache is imported only when it is chosen.
"""

from collections.abc import Callable

from runner.cache.interface import Cache, CacheBudget, PrefixCache, Session

__all__ = ["CACHE_KINDS", "Cache", "CacheBudget", "PrefixCache", "Session", "make_cache"]

CACHE_KINDS = ("trie", "single", "none")


def make_cache(
    kind: str,
    make_layers: Callable[[], list[object]],
    *,
    budget_bytes: int | None = None,
    turn_tokens: frozenset[int] = frozenset(),
) -> Cache:
    """The cache of a kind out of CACHE_KINDS, over the layers of one model.

    `make_layers` returns a fresh cache list of that model, as its forward takes it. `budget_bytes` bounds what the trie
    holds between requests, and `turn_tokens`, the special tokens around messages, tell it where prompts often part.
    Raises ValueError for a kind that does not exist.
    """
    if kind == "trie":
        from runner.cache.checkpoints import TurnCheckpoints
        from runner.cache.trie_cache import TrieCache

        return TrieCache(make_layers, budget_bytes, TurnCheckpoints(turn_tokens))
    if kind == "single":
        from runner.cache.single import SingleEntryCache

        return SingleEntryCache(make_layers)
    if kind == "none":
        from runner.cache.none import NullCache

        return NullCache(make_layers)
    raise ValueError(f"no cache of kind {kind!r}: it is one of {', '.join(CACHE_KINDS)}")
