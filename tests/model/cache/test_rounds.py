"""Rounds over real models: logits, trie and next prompts are those of an answer in single steps."""

import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache import make_cache
from runner.cache.none import NullCache
from scripts.tools.models.tiny import CHUNK, KINDS, WINDOW, tiny, words
from tests.lib.driver import Answer, ask, ask_uncached, check_equal
from tests.lib.memory import held_bytes
from tests.lib.pairs import pairs
from tests.lib.rounds import Drafting, ask_in_rounds, closing, contents

UNMARKABLE = ("deepseek_v41",)
MARKABLE = tuple(kind for kind in KINDS if kind not in UNMARKABLE)
STATEFUL = ("mamba2", "qwen3_next", "falcon_h1")
every_kind = pytest.mark.parametrize("kind", MARKABLE)
PAIRS = pairs(MARKABLE, ("1", "2", "4", "7"), map(str, (9, WINDOW - 4, WINDOW + 1, 2 * CHUNK - 1)))


@pytest.mark.parametrize(("kind", "drafts", "length"), PAIRS)
def test_an_answer_in_rounds_is_the_plain_one(kind: str, drafts: str, length: str) -> None:
    """Every number of right tokens; windows that are not full, get full in a round, just are, and chunks that end."""
    model, prompt, k = tiny(kind), words(int(length)), int(drafts)
    plain_cache = make_cache("trie", model.make_layers)
    plain = ask(model, plain_cache, prompt, say=16)
    for rounds in ([(k + 1, m)] for m in range(1, k + 2)):
        cache = make_cache("trie", model.make_layers)
        answer = ask_in_rounds(model, cache, prompt, plain, rounds)
        check_equal(model, answer, plain)
        assert contents(cache) == contents(plain_cache)


@every_kind
def test_no_layer_computes_again_what_was_right(kind: str) -> None:
    model = tiny(kind)
    for length in (10, 60):
        plain = ask_uncached(model, words(length), say=8)
        with closing(Drafting(model, NullCache(model.make_layers), words(length), plain.tokens)) as drafting:
            assert drafting.round(5, 5)
            assert drafting.round(4, 2)


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


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_next"])
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
