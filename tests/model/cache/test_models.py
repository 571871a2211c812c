"""The caches over real layer caches: answers equal those of a run without a cache.

A resumed conversation is bit-equal to a run that made the same forwards in one go; against a run with other forwards it
is equal up to the noise that these make by themselves (`tiny.py` has it for every model).
Scenarios: docs/internals/cache.md, 8.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from runner.cache.checkpoints import Checkpoint, CheckpointPolicy
from runner.cache.layer_interface import Miss
from runner.cache.single import SingleEntryCache
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import KINDS, WINDOW, tiny, words
from tests.lib.driver import (
    Accident,
    ask,
    ask_uncached,
    check_equal,
    check_level,
    check_trie,
    forwards_at_once,
    largest,
)
from tests.lib.memory import held_bytes

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("length", [WINDOW - 4, WINDOW - 3, 2 * WINDOW + 5])
def test_a_divergence_inside_a_full_window_computes_all_again(length: int) -> None:  # scenario 13
    """4 tokens are said, so the record ends at length + 4. mlx-lm's own trim of a wrapped window is wrong by several
    units of logit here, without an error."""
    model = tiny("gemma3")
    cache = SingleEntryCache(model.facts)
    prompt = words(length)
    ask(model, cache, prompt)
    other = [*prompt[:-3], *words(8, seed=4)]
    answer = ask(model, cache, other)
    check_equal(model, answer, ask_uncached(model, other))
    if length + 4 <= WINDOW:
        assert (answer.session.cached, answer.session.miss) == (length - 3, Miss.NONE)
    else:
        assert (answer.session.cached, answer.session.miss) == (0, Miss.WINDOW_PASSED)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_next", "llama4"])
@pytest.mark.parametrize(("accident", "at"), [("cancel", 1), ("skip", 6), ("break", 4), ("poison", 6)])
def test_after_an_accident_in_any_forward_the_next_answer_is_right(kind: str, accident: str, at: int) -> None:
    """Forwards 0 to 3 are prefill, 4 is the last token of the prompt, the others are sampled tokens."""  # scenario 11
    model = tiny(kind)
    cache = SingleEntryCache(model.facts)
    prompt = words(26)
    before = ask(model, cache, prompt[:3], say=0)
    assert before.session.cached == 0
    cut = ask(model, cache, prompt, chunk=6, accident=Accident(accident, at))
    check_level(cache)
    if accident in ("break", "poison"):
        assert cache.tokens == []
    longer = [*prompt, *cut.tokens, *words(5, seed=7)]
    check_equal(model, ask(model, cache, longer), ask_uncached(model, longer))
    check_level(cache)


def test_a_closed_session_leaves_nothing_to_compute() -> None:
    """A recorded token has real data behind it, also the convolution states that no logits depend on."""
    model = tiny("mamba2")
    cache = SingleEntryCache(model.facts)
    ask(model, cache, words(100), chunk=100)
    sequence = cache.sequence
    assert sequence is not None
    before = held_bytes()
    sequence.evaluate()
    assert held_bytes() == before


class NoPoints(CheckpointPolicy):
    """Nothing but the ends of sequences can be come back to."""

    def plan(
        self, tokens: Sequence[int], cached: int, branch: int, most: int | None, fits: int | None = None
    ) -> list[Checkpoint]:
        return []


@every_kind
@pytest.mark.parametrize("away", [False, True])
def test_a_conversation_that_comes_back_is_bit_equal_to_one_that_never_left(away: bool, kind: str) -> None:
    model = tiny(kind)
    cache = TrieCache(model.facts, policy=NoPoints()) if away else SingleEntryCache(model.facts)
    prompt = words(41)
    first = ask(model, cache, prompt, chunk=16)
    if away:
        ask(model, cache, words(70, seed=3), chunk=16)
    longer = [*prompt, *first.tokens, *words(37, seed=2)]
    back = ask(model, cache, longer, chunk=16)
    if isinstance(cache, TrieCache):
        check_trie(cache)
    assert back.session.cached == 45
    oracle = forwards_at_once(model, longer + back.tokens, [16, 16, 8, 1, *[1] * 4, 16, 16, 4, 1, *[1] * 3])
    for ours, theirs in zip([*first.logits, *back.logits], [*oracle[3:7], *oracle[-4:]], strict=True):
        if away and kind in (
            "gemma3",
            "llama4",
        ):  # a ring comes back in order, a chunk without hidden tokens
            assert largest(ours - theirs) <= model.tolerance
        else:
            assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 65, 97])
@pytest.mark.parametrize(("tail", "say"), [(1, 0), (3, 3)])
def test_a_conversation_comes_back_at_any_length_of_its_window(length: int, tail: int, say: int) -> None:  # scenario 80
    model = tiny("gemma3")
    cache = TrieCache(model.facts, policy=NoPoints())
    prompt = words(length)
    first = ask(model, cache, prompt, say=say)
    ask(model, cache, words(50, seed=5))
    longer = [*prompt, *first.tokens, *words(tail, seed=2)]
    back = ask(model, cache, longer)
    assert back.session.cached == length + say
    check_equal(model, back, ask_uncached(model, longer))


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
