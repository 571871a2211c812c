"""Prefix caches: a prompt reuses the layers that earlier prompts have computed.

All code here runs on the engine thread, the only owner of sessions, layers, nodes and snapshots. Read in this order:

* `interface.py`, the port to the engine; `session.py`: sessions, alone and in a batch; `single.py`: the small caches;
* `layer_interface.py`: snapshots; `layers/`: one interface to mlx-lm's layer caches; `sketch.py`: the facts about the
  layers of a model; `sequence.py`: the layers of one sequence, moved together;
* `node.py`, `trie.py`: the nodes; `sequences.py`: the sequences of layers beside one trie; `resume.py`: brings layers
  to an offset on a path; `trie_cache.py` combines all of these;
* policies: `checkpoints.py` (the offsets at which states are kept), `eviction.py` (the order of eviction, the budget).

Always true between two forwards: all layers of a sequence stand at one offset; a record never claims a token that its
layers have not seen; each snapshot is either live in one layer or owns its bytes; each snapshot is closed exactly once;
the ledger counts the open snapshots.

`make_cache` chooses a cache by its kind, and imports only the chosen one.
"""

from typing import TYPE_CHECKING

from runner.cache.interface import PrefixCache
from runner.settings import CACHE_KINDS

if TYPE_CHECKING:
    from runner.cache.sketch import LayerFacts

__all__ = ["CACHE_KINDS", "PrefixCache", "make_cache"]


def make_cache(
    kind: str,
    facts: "LayerFacts",
    *,
    budget_bytes: int | None = None,
    turn_tokens: frozenset[int] = frozenset(),
) -> PrefixCache:
    """Returns a cache of a kind in CACHE_KINDS, over the layers of one model. `budget_bytes` limits what the trie keeps
    between requests. `turn_tokens` are the special tokens around messages, where prompts often diverge. Raises
    ValueError for an unknown kind."""
    if kind == "trie":
        from runner.cache.checkpoints import CheckpointPolicy
        from runner.cache.trie_cache import TrieCache

        return TrieCache(facts, budget_bytes, CheckpointPolicy(turn_tokens))
    if kind in ("single", "none"):
        from runner.cache.single import NullCache, SingleEntryCache

        return SingleEntryCache(facts) if kind == "single" else NullCache(facts)
    raise ValueError(f"no cache of kind {kind!r}: it is one of {', '.join(CACHE_KINDS)}")
