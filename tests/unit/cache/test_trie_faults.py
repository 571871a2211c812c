"""Faults in the trie cache, over fake layers: the next request is right, whatever broke, and when.

A fault is an exception in the k-th call of something that allocates: a copy out, a restore, a cut or a join, the
evaluation at the end. For each the same story is told with the fault in the first call, the second, and then in larger
steps until it is not reached any more.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from runner.cache.interface import Miss
from runner.cache.sequence import SequenceLayers
from runner.cache.trie import PrefixTrie
from tests.lib.breaking import breaking
from tests.lib.fakes import FAMILIES, FakeKVState, FakeRecurrentState, FakeSlice, FakeState, FakeWindowState
from tests.lib.story import Conversation, Every

A = list(range(1, 21))
B = [*A[:10], *range(50, 60)]
C = [*A[:13], *range(70, 80)]
everyone = pytest.mark.parametrize("family", FAMILIES)

# Restores, copies out, cuts and joins, the budget, a prompt that ends inside an edge, and the same prompt twice.
STORY = [A, [*A, 20, 21, 30], B, C, [*A, 20, 21, 30, 20, 21, 31], [200, 201, 202], B, A[:7], C, A]


class Place(NamedTuple):
    """The method that breaks."""

    where: type
    name: str
    families: str


PLACES = [
    Place(FakeKVState, "copy", "KR"),
    Place(FakeKVState, "restore", "KR"),
    Place(FakeKVState, "snapshot", "KR"),
    Place(FakeSlice, "split", "KR"),
    Place(FakeSlice, "after", "KR"),
    Place(FakeWindowState, "copy", "S"),
    Place(FakeWindowState, "restore", "S"),
    Place(FakeRecurrentState, "copy", "RP"),
    Place(FakeRecurrentState, "restore", "RP"),
    Place(FakeState, "split", "RP"),
    Place(FakeState, "after", "RP"),
    Place(SequenceLayers, "evaluate", "KR"),
    Place(SequenceLayers, "rewind", "KR"),
    Place(PrefixTrie, "advance", "KR"),
]


def cases(places: Sequence[Place]) -> list[ParameterSet]:
    """Each place with each of its families."""
    return [
        pytest.param(family, place, id=f"{place.where.__name__}.{place.name}-{family}")
        for place in places
        for family in place.families
    ]


@pytest.mark.parametrize(("family", "place"), cases(PLACES))
@pytest.mark.parametrize("budget", [None, 90])
def test_whatever_breaks_the_next_request_is_right(
    family: str, place: Place, budget: int | None
) -> None:  # scenario 77
    at, reached = 0, True
    while reached:
        users = Conversation(family, "trie", chunk=9, policy=Every(8), budget=budget)
        with breaking(place.where, place.name, at) as calls:
            for prompt in STORY:
                broken = False
                try:
                    users.turn(prompt)
                except MemoryError:
                    broken = True
                assert not broken or len(calls) > at
        for prompt in (B, A, C):
            users.turn(prompt)
        reached = len(calls) > at
        at += 1 + at // 2
    assert at > 1, "the story never came there"


@everyone
@pytest.mark.parametrize("after_chunks", [0, 2])
def test_a_failed_forward_costs_the_others_nothing(
    family: str, after_chunks: int, caplog: pytest.LogCaptureFixture
) -> None:  # scenario 77
    users = Conversation(family, "trie", policy=Every(8))
    other = list(range(500, 512))
    users.turn(other)
    users.turn(A)
    users.failed_forward([*A, 20, 21, *range(30, 50)], after_chunks)
    assert [record.__dict__["attributes"] for record in caplog.records] == [{"why": "a forward failed"}]
    assert users.record == []
    assert users.turn([*other, 20, 21, 22]).cached == 14
    # What was live is gone, and with it the keys and values of all but the prefixes that others share.
    assert users.turn([*A, 1]).cached == (16 if family == "P" else 0)


@everyone
def test_a_failed_evaluation_is_a_failed_forward(family: str) -> None:
    users = Conversation(family, "trie", policy=Every(8))
    users.turn(A)
    session = users.cache.begin([*A, 20, 21, 22, 23])
    users.prefill(session, [*A, 20, 21, 22, 23])
    session.close(failed=True)
    users.check_closed()
    assert users.record == []
    users.turn([*A, 20, 21, 22, 23])


def _with_a_hole() -> Conversation:
    """The keys and values of the first ten tokens are lost; those of what follows them in A are not."""
    users = Conversation("R", "trie")
    users.turn(A)
    users.turn(B)
    users.failed_forward([*B, 20, 21, 30], 0)
    users.trie.trie.remove(users.node([*B, 20, 21]))  # of which only a state was left
    assert users.shape == "0-10 [10-22]"
    above, below = users.nodes
    assert (above.slots[0], above.slots[1] is None, below.slots[0] is None) == (None, False, False)
    return users


def test_tokens_behind_a_gap_are_not_merged_with_it() -> None:
    """Joined, they would not be the edge: a later request would resume with the wrong tokens."""
    users = _with_a_hole()
    users.trie.trie.merge(users.nodes[0])
    users.check_trie(None)
    assert users.nodes[0].slots[0] is None
    assert users.turn([*A, 20, 21, 30]).cached == 0


def test_tokens_before_a_gap_are_not_merged_with_it() -> None:
    users = Conversation("R", "trie")
    for prompt in (A, B, [200]):
        users.turn(prompt)
    users.trie.trie.remove(users.node([*B, 20, 21]))
    above, below = users.node(A[:10]), users.node([*A, 20, 21])
    below.slots[0], lost = None, below.slots[0]
    assert lost is not None
    lost.close()
    users.trie.trie.merge(above)
    users.check_trie(None)
    assert below.slots[0] is None
    assert users.turn([*A, 20, 21, 30]).cached == 0


def test_a_gap_is_filled_by_the_next_request_through_it() -> None:
    users = _with_a_hole()
    assert users.turn([*A, 20, 21, 30]).cached == 0
    assert all(slot is not None for node in users.nodes for slot in node.slots)
    assert users.turn([*A, 20, 21, 30, 20, 21, 31]).cached == 25


@everyone
@pytest.mark.parametrize("what", ["adapter-b", "kv-bits-8", "image-7f"])
def test_salts_never_share(family: str, what: str) -> None:  # scenarios 78 and 82
    """Another adapter, another format of the cache, another image behind the same placeholders."""
    users = Conversation(family, "trie", policy=Every(8))
    users.turn(A)
    session = users.turn([*A, 20, 21, 22], salt=what)
    assert (session.matched, session.cached, session.miss) == (0, 0, Miss.SALT)
    assert users.turn([*A, 20, 21, 22, 20, 21, 23], salt=what).cached == 25
    assert users.turn([*A, 20, 21, 24]).cached == 22
    assert users.turn([*A, 20, 21, 22, 20, 21, 23], salt=what).matched == 26
    assert users.turn([200], salt=what).miss == Miss.NO_COMMON_PREFIX


@everyone
def test_an_answer_up_to_the_limit_of_the_context_is_kept_whole(family: str) -> None:  # scenario 81
    """The last token that fits is recorded, and no answer can continue it; but the prompt can be asked again."""
    users = Conversation(family, "trie", policy=Every(8))
    context = 32
    prompt = list(range(context - 1))
    users.turn(prompt, [60])
    assert len(users.record) == context
    assert users.turn(prompt, [61]).cached == (context - 2 if family == "K" else context - 5)


@everyone
def test_an_open_session_is_not_disturbed(family: str) -> None:  # scenario 83
    users = Conversation(family, "trie", policy=Every(8))
    users.turn(A)
    prompt = [*A, 20, 21, *range(30, 50)]
    session = users.cache.begin(prompt)
    with pytest.raises(RuntimeError, match="open"):
        users.cache.clear()
    users.prefill(session, prompt)
    session.close()
    users.check_closed()
    assert users.turn([*prompt, 1]).cached == len(prompt) - 1


@everyone
def test_closing_twice_does_nothing(family: str) -> None:  # scenario 85
    users = Conversation(family, "trie", policy=Every(8))
    first = users.turn(A)
    first.close(failed=True)
    users.check_closed()
    prompt = [*A, 20, 21, *range(30, 50)]
    second = users.cache.begin(prompt)
    first.close(failed=True)
    users.prefill(second, prompt)
    second.close()
    assert users.turn([*prompt, 1]).cached == len(prompt) - 1


@everyone
def test_an_empty_prompt_is_refused_and_touches_nothing(family: str) -> None:
    users = Conversation(family, "trie")
    users.turn(A)
    with pytest.raises(ValueError, match="at least one token"):
        users.cache.begin([])
    users.check_closed()
    assert users.turn([*A, 20, 21, 9]).cached == 22


def test_what_cannot_be_kept_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    users = Conversation("K", "trie")
    with breaking(SequenceLayers, "evaluate", 0), caplog.at_level(logging.ERROR):
        users.turn(A)
    assert caplog.records[-1].message == "cache freed: a conversation could not be kept"
    assert users.turn(A).miss == Miss.EMPTY


def test_a_trie_that_breaks_while_a_prompt_runs_is_given_up() -> None:
    """A node that is half joined must not be met again."""
    users = Conversation("R", "trie", policy=Every(8))
    users.turn(A)
    users.trie.budget_bytes = users.cache.nbytes + 10  # so that a state has to go for another conversation
    with breaking(FakeState, "after", 0), pytest.raises(MemoryError):
        users.turn(range(100, 130))
    assert (users.shape, users.record) == ("", [])
    users.turn(range(100, 130))
