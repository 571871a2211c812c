"""The trie cache over real layer caches: what comes back is what went.

A resumed conversation is bit-equal to a run that made the same forwards in one go; against a run with other forwards it
is equal up to the noise that these make by themselves (`tiny.py` has it for every model).

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from runner.cache.checkpoints import Checkpoint, CheckpointPolicy
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import KINDS, WINDOW, tiny, words
from tests.lib.driver import ask, ask_uncached, check_equal, check_trie, forwards_at_once, largest

every_kind = pytest.mark.parametrize("kind", KINDS)


class NoPoints(CheckpointPolicy):
    """Nothing but the ends of sequences can be come back to."""

    def plan(self, tokens: Sequence[int], cached: int, branch: int, most: int | None) -> list[Checkpoint]:
        return []

    def expired(self, points: Sequence[int], end: int) -> list[int]:
        return []


@every_kind
def test_a_conversation_that_comes_back_is_bit_equal_to_one_that_never_left(kind: str) -> None:
    model = tiny(kind)
    cache = TrieCache(model.facts, policy=NoPoints())
    prompt, other = words(41), words(70, seed=3)
    first = ask(model, cache, prompt, chunk=16)
    ask(model, cache, other, chunk=16)
    longer = [*prompt, *first.tokens, *words(37, seed=2)]
    back = ask(model, cache, longer, chunk=16)
    check_trie(cache)
    assert back.session.cached == 45
    oracle = forwards_at_once(model, longer + back.tokens, [16, 16, 8, 1, *[1] * 4, 16, 16, 4, 1, *[1] * 3])
    for ours, theirs in zip(back.logits, oracle[-4:], strict=True):
        if kind in ("gemma3", "llama4"):  # a ring comes back in the order of time, a chunk without what it hides
            assert largest(ours - theirs) <= model.tolerance
        else:
            assert mx.array_equal(ours, theirs)


LENGTHS = [1, 31, 32, 33, 65, 97]


def _comes_back(length: int, tail: int, say: int) -> None:
    model = tiny("gemma3")
    cache = TrieCache(model.facts, policy=NoPoints())
    prompt = words(length)
    first = ask(model, cache, prompt, say=say)
    ask(model, cache, words(50, seed=5))
    longer = [*prompt, *first.tokens, *words(tail, seed=2)]
    back = ask(model, cache, longer)
    assert back.session.cached == length + say
    check_equal(model, back, ask_uncached(model, longer))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_conversation_comes_back_at_any_length_of_its_window(length: int) -> None:  # scenario 80
    _comes_back(length, tail=1, say=0)
    _comes_back(length, tail=3, say=3)


def test_a_window_is_whole_where_the_way_above_has_a_gap() -> None:
    """A node's window is copied whole if an ancestor no longer holds the tokens that it needs."""
    model = tiny("gemma3")
    cache = TrieCache(model.facts, policy=NoPoints())
    prompt = words(3 * WINDOW)
    ask(model, cache, prompt, say=0)
    half = prompt[: 2 * WINDOW]  # ends within the edge, before what its window held
    ask(model, cache, [*half, *words(5, seed=3)], say=0)
    ask(model, cache, words(40, seed=4))
    longer = [*half, *words(5, seed=3), *words(9, seed=5)]
    back = ask(model, cache, longer)
    assert back.session.cached == 2 * WINDOW + 5
    check_equal(model, back, ask_uncached(model, longer))
