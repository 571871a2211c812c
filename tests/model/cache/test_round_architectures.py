"""Every architecture of the installed mlx-lm answers in rounds as it does in steps, and leaves the same behind."""

import mlx.core as mx
import pytest

from runner.cache import make_cache
from runner.cache.none import NullCache
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import VOCAB, words
from tests.lib.driver import ask, check_equal, check_trie
from tests.lib.rounds import Drafting, ask_in_rounds, closing, contents
from tests.model.cache.test_draft_trial import REFUSED, SERVED

ROUNDS = [(5, 3), (2, 1), (3, 3), (8, 4), (5, 1), (8, 8)]
DRAFTING = tuple(name for name in SERVED if name not in REFUSED)


@pytest.mark.parametrize("name", DRAFTING)
def test_an_architecture_answers_in_rounds_as_in_steps(name: str) -> None:
    """Beginning before its windows and chunks are full, and long after."""
    model = build(name)
    ours, theirs = (make_cache("trie", model.make_layers) for _ in range(2))
    history = words(5, seed=2)
    for turn in range(3):
        plain = ask(model, theirs, history, say=14, chunk=16)
        answer = ask_in_rounds(model, ours, history, plain, ROUNDS[turn:] + ROUNDS[:turn], chunk=16)
        assert (answer.session.matched, answer.session.cached) == (plain.session.matched, plain.session.cached)
        check_equal(model, answer, plain)
        assert isinstance(ours, TrieCache)
        check_trie(ours)
        assert contents(ours) == contents(theirs)
        history = [*history, *answer.tokens, *words(7 if turn else 30, seed=turn + 3)]
    edited = [*history[:25], *words(9, seed=9)]
    mine, other = (ask(model, cache, edited, chunk=16) for cache in (ours, theirs))
    assert (mine.session.matched, mine.session.cached) == (other.session.matched, other.session.cached)
    check_equal(model, mine, other)
    assert contents(ours) == contents(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_an_architecture_goes_back_to_behind_any_token(name: str, k: int) -> None:
    model = build(name)
    for length in (4, 15, 41):
        prompt = words(length, seed=4)
        plain = ask(model, NullCache(model.make_layers), prompt, say=16, chunk=16)
        for right in range(1, k + 2):
            cache = NullCache(model.make_layers)
            check_equal(model, ask_in_rounds(model, cache, prompt, plain, [(k + 1, right)], chunk=16), plain)


@pytest.mark.parametrize("name", DRAFTING)
def test_an_architecture_forgets_a_round_that_was_given_up(name: str) -> None:
    """To the bit: what follows is what would have followed without the round."""
    model, prompt = build(name), words(41, seed=4)
    said = [(7 * i + 3) % VOCAB for i in range(6)]
    logits = []
    for drafts in (True, False):
        with closing(Drafting(model, NullCache(model.make_layers), prompt, said, chunk=16)) as drafting:
            for _ in range(4):
                if drafts:
                    drafting.draft(5, 1)
                    drafting.session.accept(0)
                drafting.step()
        logits.append(mx.stack(drafting.logits))
    assert mx.array_equal(logits[0], logits[1])
