"""Rounds over real models: logits, trie and next prompts are those of an answer in single steps."""

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache import CACHE_KINDS, make_cache
from runner.cache.interface import Cache
from runner.cache.none import NullCache
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import CHUNK, KINDS, WINDOW, Tiny, tiny, words
from tests.lib.driver import Answer, ask, ask_uncached, breaking_layer, check_equal, check_trie
from tests.lib.memory import held_bytes
from tests.lib.rounds import Drafting, ask_in_rounds, closing, contents

UNMARKABLE = ("deepseek_v41",)
MARKABLE = tuple(kind for kind in KINDS if kind not in UNMARKABLE)
STATEFUL = ("mamba2", "qwen3_next", "falcon_h1")
every_kind = pytest.mark.parametrize("kind", MARKABLE)
every_cache = pytest.mark.parametrize("cache_kind", CACHE_KINDS)
drafts = pytest.mark.parametrize("k", [1, 2, 4, 7])


def check_closed(tiny: Tiny, ours: Cache, plain: Cache, history: list[int]) -> None:
    """Two caches hold the same, and go on with it the same way."""
    if isinstance(ours, TrieCache):
        check_trie(ours)
    assert contents(ours) == contents(plain)
    for prompt in ([*history, *words(9, seed=4)], history[: len(history) * 2 // 3] + words(5, seed=6)):
        mine, theirs = ask(tiny, ours, prompt), ask(tiny, plain, prompt)
        assert mine.session.matched == theirs.session.matched
        assert mine.session.cached == theirs.session.cached
        check_equal(tiny, mine, theirs)
        assert contents(ours) == contents(plain)


@every_kind
@drafts
@pytest.mark.parametrize("length", [9, WINDOW - 4, WINDOW + 1, 2 * CHUNK - 1])
def test_an_answer_in_rounds_is_the_plain_one(kind: str, k: int, length: int) -> None:
    """Every number of right tokens; windows that are not full, get full in a round, just are, and chunks that end."""
    model, prompt = tiny(kind), words(length)
    plain_cache = make_cache("trie", model.make_layers)
    plain = ask(model, plain_cache, prompt, say=16)
    for rounds in ([(k + 1, m)] for m in range(1, k + 2)):
        cache = make_cache("trie", model.make_layers)
        answer = ask_in_rounds(model, cache, prompt, plain, rounds)
        check_equal(model, answer, plain)
        assert contents(cache) == contents(plain_cache)


@every_kind
@every_cache
def test_a_conversation_in_rounds_leaves_what_a_plain_one_does(kind: str, cache_kind: str) -> None:
    model = tiny(kind)
    ours, theirs = (make_cache(cache_kind, model.make_layers) for _ in range(2))
    history = words(20)
    for turn, rounds in enumerate(([(5, 2), (1, 1), (3, 3)], [(8, 8), (8, 1)], [(2, 1), (5, 4), (5, 0)])):
        plain = ask(model, theirs, history, say=12)
        answer = ask_in_rounds(model, ours, history, plain, rounds)
        assert answer.session.cached == plain.session.cached
        check_equal(model, answer, plain)
        assert contents(ours) == contents(theirs)
        history = [*history, *answer.tokens, *words(6, seed=turn + 2)]
    check_closed(model, ours, theirs, history)


@every_kind
def test_no_layer_computes_again_what_was_right(kind: str) -> None:
    model = tiny(kind)
    for length in (10, 60):
        plain = ask_uncached(model, words(length), say=8)
        with closing(Drafting(model, NullCache(model.make_layers), words(length), plain.tokens)) as drafting:
            assert drafting.round(5, 5)
            assert drafting.round(4, 2)


@every_kind
@every_cache
@pytest.mark.parametrize("length", [9, WINDOW - 3, WINDOW + 9])
@pytest.mark.parametrize("known", [0, 1, 3])
def test_who_leaves_in_a_round_leaves_nothing_of_it(kind: str, cache_kind: str, length: int, known: int) -> None:
    """Between the round and `accept`, with some of its tokens recorded."""
    model, prompt = tiny(kind), words(length)
    ours, theirs = (make_cache(cache_kind, model.make_layers) for _ in range(2))
    said = ask_uncached(model, prompt, say=10).tokens
    with (
        closing(Drafting(model, ours, prompt, said)) as drafting,
        closing(Drafting(model, theirs, prompt, said)) as plain,
    ):
        for each in (drafting, plain):
            each.round(3, 3)
            each.step()
        drafting.draft(5, 3)  # the next token, which is recorded, and four behind it
        for token in said[4 : 4 + known]:
            drafting.session.record(token)
        plain.step()
        plain.session.recorded[length:] = said[: 4 + known]
    check_closed(model, ours, theirs, [*prompt, *said])


@every_kind
@every_cache
@pytest.mark.parametrize("how", ["break", "poison"])
def test_a_round_that_fails_frees_what_a_step_that_fails_does(kind: str, cache_kind: str, how: str) -> None:
    model, prompt = tiny(kind), words(26)
    ours, theirs = (make_cache(cache_kind, model.make_layers) for _ in range(2))
    said = ask_uncached(model, prompt, say=10).tokens
    for cache in (ours, theirs):
        ask(model, cache, prompt[:12], say=2)
        drafting = Drafting(model, cache, prompt, said)
        drafting.step()
        if cache is ours and how == "poison":
            drafting.draft(5, 3)
        elif cache is ours:
            with pytest.raises(MemoryError), breaking_layer(model, wanted=True):
                drafting.draft(5, 3)
        drafting.session.close(failed=how == "poison" or cache is theirs)
    check_closed(model, ours, theirs, [*prompt, *said])


@every_kind
def test_a_round_that_was_given_up_changes_nothing(kind: str) -> None:
    """Nor does it change a bit of what follows, unless a window was put into the order of time."""
    model, prompt = tiny(kind), words(40)
    plain = ask_uncached(model, prompt, say=6)
    with closing(Drafting(model, NullCache(model.make_layers), prompt, plain.tokens)) as drafting:
        for _ in range(4):
            drafting.draft(5, 1)
            drafting.session.accept(0)
            drafting.step()
    for ours, theirs in zip(drafting.logits, plain.logits, strict=False):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", UNMARKABLE)
def test_a_class_that_is_unknown_has_no_rounds(kind: str) -> None:
    model = tiny(kind)
    drafting = Drafting(model, NullCache(model.make_layers), words(10), [1, 2, 3])
    assert not drafting.session.sequence.markable
    with pytest.raises(TypeError, match="takes no marks"):
        drafting.draft(2, 1)
    drafting.step()
    drafting.session.close()


@every_kind
def test_what_a_round_keeps_is_what_it_says(kind: str) -> None:
    """Windows that are full, and states with what they read; nothing of layers that rewind."""
    model = tiny(kind)
    said = ask_uncached(model, words(60), say=8).tokens
    with closing(Drafting(model, NullCache(model.make_layers), words(60), said)) as drafting:
        drafting.step()
        sequence = drafting.session.sequence
        held = sum(
            state.nbytes for _, state in sequence.used if state.whole or (kind == "gemma3" and not state.sliceable)
        )
        said_bytes = drafting.session.round_bytes(4)
        assert said_bytes > held if kind in STATEFUL else said_bytes == held
        assert (held == 0) == (kind not in (*STATEFUL, "gemma3"))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_next", "llama"])
def test_rounds_leave_no_memory_behind(kind: str) -> None:
    model, prompt = tiny(kind), words(50)

    def answer(rounds: list[tuple[int, int]]) -> tuple[int, Answer]:
        cache = make_cache("single", model.make_layers)
        said = ask_in_rounds(model, cache, prompt, plain, rounds)
        held = held_bytes()
        cache.clear()
        return held - held_bytes(), said

    plain = ask_uncached(model, prompt, say=30)
    answer([(5, 3)])
    (steps, _), (rounds, _) = answer([(1, 1)]), answer([(5, 3), (4, 4)])
    assert rounds <= steps + 16_384
