"""The trie cache over fake layers when memory is short: what goes, what stays, and what is said about it.

A token is a byte in each layer, and a recurrent state STATE_BYTES; K has two layers of tokens, R one and a state.
Scenarios: docs/internals/cache.md, 8.
"""

import logging

import pytest

from runner.cache import trie_cache
from tests.lib.fakes import FAMILIES, STATE_BYTES
from tests.lib.story import At, Conversation, Every
from tests.lib.together import own

PREFIX = [1, 2, 3, 4, 5]
everyone = pytest.mark.parametrize("family", FAMILIES)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


# Room for about two conversations of 17 tokens.
@pytest.mark.parametrize(("family", "budget"), [("K", 70), ("S", 60), ("R", 100), ("P", 150)])
def test_a_shared_prefix_outlives_those_who_share_it(family: str, budget: int) -> None:  # scenarios 68 and 69
    users = Conversation(family, "trie", budget=budget, policy=At(5))
    for user in range(1, 6):
        users.turn([*PREFIX, *own(user)])
        assert users.turn([*PREFIX, *own(user), 20, 21, 22]).cached == 17, "the last conversation is still there"
    assert len(users.nodes) < 6, "no node was evicted"
    session = users.turn([*PREFIX, *own(6)])
    assert (session.matched, session.cached) == (5, 5)


@pytest.mark.parametrize(("family", "gone"), [("K", 0), ("S", 4), ("R", STATE_BYTES), ("P", 2 * STATE_BYTES)])
def test_an_inner_node_that_goes_gives_back_its_state_only(family: str, gone: int) -> None:  # scenario 70
    users = Conversation(family, "trie", policy=At(5))
    users.turn([*PREFIX, *own(1)])
    users.turn(own(2))  # the first conversation is paged out
    held = users.cache.nbytes
    users.trie.trie.merge(users.node([*PREFIX, *own(1)] if family == "K" else PREFIX))
    users.check_trie(None)
    assert users.cache.nbytes == held - gone
    assert users.turn([*PREFIX, *own(1), 20, 21, 22]).cached == 17


@pytest.mark.parametrize(("family", "budget", "kept"), [("K", 30, 15), ("S", 36, 24), ("R", 30, 8), ("P", 30, 0)])
def test_a_conversation_larger_than_the_budget_keeps_its_beginning(family: str, budget: int, kept: int) -> None:
    """Of 40 tokens and 2 more: K has room for 30 bytes / 2, S for 36 - 4, and the last of three points at 24; R for
    30 - 16, with a point at 8. P's states take 32 bytes, whatever they have seen."""
    users = Conversation(family, "trie", budget=budget, policy=Every(8))
    prompt = list(range(40))
    users.turn(own(1))
    users.turn(prompt)
    assert users.record == prompt[:kept]
    assert users.turn([*prompt[:kept], 99]).cached == kept


def test_a_conversation_loses_only_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was divided while it was live, so nothing is copied."""
    monkeypatch.setattr(trie_cache, "_PIECE", 8)
    users = Conversation("K", "trie", budget=64)
    users.turn(range(100, 124))
    assert users.shape == "0-8* [8-16* [16-24 [24-26]]]"
    users.turn(range(12), [])
    assert users.cache.nbytes == 2 * (12 + 16)
    assert users.turn(range(100, 124), []).cached == 16
    assert [node.passed for node in users.node(range(100, 124)).path()[1:]] == [True, False, None]


@everyone
def test_a_request_beyond_the_budget_is_logged_once(family: str, caplog: pytest.LogCaptureFixture) -> None:
    users = Conversation(family, "trie", budget=30)
    for user in range(3):
        users.turn([*own(user), *range(40)])
    assert sorted(warnings(caplog)) == [
        "a conversation is larger than the cache: only its beginning is kept",
        "running requests need more than the cache may hold",
    ]


@pytest.mark.parametrize(("states", "most"), [(8, 3), (48, 6)])
def test_checkpoints_of_one_prompt_are_three_or_take_an_eighth_of_the_budget(states: int, most: int) -> None:
    users = Conversation("R", "trie", budget=states * STATE_BYTES, policy=Every(2))
    users.turn([7])  # how large a state is, is known after the first forward
    users.trie.sequences.facts.passes = True  # else four are the most for so few tokens
    session = users.trie._resume(prompt := list(range(100, 120)), "")
    assert [point.at for point in session.checkpoints] == [2, 4, 6, 8, 10, 12][:most]
    users.prefill(session, prompt)
    session.close()
