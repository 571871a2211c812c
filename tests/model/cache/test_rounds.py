"""Rounds over real models: logits, trie and next prompts are those of an answer in single steps."""

import pytest

from runner.cache import make_cache
from runner.cache.single import NullCache
from scripts.tools.models.tiny import CHUNK, KINDS, WINDOW, tiny, words
from tests.lib.driver import ask, ask_uncached, check_equal
from tests.lib.pairs import pairs
from tests.lib.rounds import Drafting, ask_in_rounds, closing, contents

UNMARKABLE = ("deepseek_v41",)
MARKABLE = tuple(kind for kind in KINDS if kind not in UNMARKABLE)
every_kind = pytest.mark.parametrize("kind", MARKABLE)
PAIRS = pairs(MARKABLE, ("1", "2", "4", "7"), map(str, (9, WINDOW - 4, WINDOW + 1, 2 * CHUNK - 1)))


@pytest.mark.parametrize(("kind", "drafts", "length"), PAIRS)
def test_an_answer_in_rounds_is_the_plain_one(kind: str, drafts: str, length: str) -> None:
    """Every number of right tokens; windows that are not full, get full in a round, just are, and chunks that end."""
    model, prompt, k = tiny(kind), words(int(length)), int(drafts)
    plain_cache = make_cache("trie", model.facts)
    plain = ask(model, plain_cache, prompt, say=16)
    for rounds in ([(k + 1, m)] for m in range(1, k + 2)):
        cache = make_cache("trie", model.facts)
        answer = ask_in_rounds(model, cache, prompt, plain, rounds)
        check_equal(model, answer, plain)
        assert contents(cache) == contents(plain_cache)


@every_kind
def test_no_layer_computes_again_what_was_right(kind: str) -> None:
    model = tiny(kind)
    for length in (10, 60):
        plain = ask_uncached(model, words(length), say=8)
        with closing(Drafting(model, NullCache(model.facts), words(length), plain.tokens)) as drafting:
            assert drafting.round(5, 5)
            assert drafting.round(4, 2)
