"""Prefix caches: the layers computed for one prompt are reused by the next.

Everything here runs on the engine thread, which alone owns sessions, layers, nodes and snapshots. Read in this order:

* `interface.py`, the port to the engine, and `session.py`, alone and in a batch; then `single.py`, the small caches;
* `layer_interface.py`: snapshots; `layers/`: one interface to mlx-lm's layer caches; `sketch.py`: the facts about the
  layers of a model; `sequence.py`: the layers of one sequence, moved together;
* `node.py`, `trie.py`: the nodes; `sequences.py`: the users of layers; `resume.py`: the way of layers along a path;
  `trie_cache.py` puts these together;
* policies: `checkpoints.py` (stops of a prefill), `eviction.py` (the order and the budget).

Always true between two forwards: all layers of a sequence stand at one offset; a record never claims a token that its
layers have not seen; each snapshot is either live in one layer or owns its bytes, and is closed exactly once; the
ledger counts the open ones.

`make_cache` chooses by name; a cache is imported only when it is chosen.
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
    """Returns a cache of a kind in CACHE_KINDS, over the layers of one model.

    `budget_bytes` limits the trie between requests. Prompts often diverge at `turn_tokens`, the special tokens around
    messages. Raises ValueError for an unknown kind.
    """
    if kind == "trie":
        from runner.cache.checkpoints import CheckpointPolicy
        from runner.cache.trie_cache import TrieCache

        return TrieCache(facts, budget_bytes, CheckpointPolicy(turn_tokens))
    if kind in ("single", "none"):
        from runner.cache.single import NullCache, SingleEntryCache

        return SingleEntryCache(facts) if kind == "single" else NullCache(facts)
    raise ValueError(f"no cache of kind {kind!r}: it is one of {', '.join(CACHE_KINDS)}")
