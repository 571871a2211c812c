"""The trie cache over fake layers: what users do, and how much of each prompt comes from the cache.

Families: K keys and values only, S with a window of 4, R with a recurrent layer, P recurrent layers only. A pair
(cached, remaining) is what `begin` found of a prompt. Numbers in comments are those of the scenarios in the reference.
`Conversation` checks layers, trie, bytes and the content of every snapshot at each step, so each story shows more than
it asserts. Scenarios: docs/internals/cache.md, 8.
"""

from collections.abc import Sequence

import pytest

from runner.cache.layer_interface import Miss
from tests.lib.fakes import FAMILIES
from tests.lib.story import At, Conversation, Every

A = [1, 2, 3, 4, 5, 6, 7, 8]
LONG = list(range(1, 48))
SAID = [20, 21, 22, 23]
everyone = pytest.mark.parametrize("family", FAMILIES)

Pair = tuple[int, int]


def by_family(
    sliceable: Sequence[Pair], others: Sequence[Pair], windows: Sequence[Pair] | None = None
) -> pytest.MarkDecorator:
    """The pairs expected of a story: of K, of the families with a layer that cannot be cut, and of S if its windows,
    which can be put together from the tails of several nodes, make a difference."""
    expected = {"K": sliceable, "S": windows or others}
    cases = [(family, list(expected.get(family, others))) for family in FAMILIES]
    return pytest.mark.parametrize(("family", "expected"), cases, ids=list(FAMILIES))


@by_family([(0, 8), (5, 3), (8, 2)], [(0, 8), (0, 8), (5, 5)], windows=[(0, 8), (0, 8), (8, 2)])
def test_a_branch_shares_what_it_has_in_common(family: str, expected: list[Pair]) -> None:  # scenario 49
    users = Conversation(family, "trie")
    served = [
        users.serve(A, [20, 21]),
        users.serve([*A[:5], 10, 11, 12], [30, 31]),
        users.serve([*A, 40, 41]),
    ]
    assert served == expected
    branches = {"K": "0-5 [5-8 [8-9 8-9] 5-8 [8-9]]", "S": "0-5* [5-8 [8-9 8-9] 5-9]"}
    assert users.shape == branches.get(family, "0-5* [5-8* [8-9 8-9] 5-9]")
    # The nodes that the second left at 5 and the third at 8 serve the next prompts that diverge there.
    assert users.serve([*A[:5], 50]) == (5, 1)
    assert users.serve([*A, 60, 61]) == (8, 2)


@by_family([(0, 8), (7, 1), (7, 1)], [(0, 8), (4, 4), (7, 1)], windows=[(0, 8), (7, 1), (7, 1)])
def test_the_same_prompt_again_computes_its_end(family: str, expected: list[Pair]) -> None:  # scenario 50
    """The place where the prompt left the known tokens is kept when the prompt comes for the second time."""
    users = Conversation(family, "trie", policy=Every(8))
    assert [users.serve(A, [20]) for _ in range(3)] == expected


@everyone
def test_a_plain_conversation_is_one_node(family: str) -> None:  # scenario 51
    users = Conversation(family, "trie")
    first, second = [*A[:5], 20, 21, 22, 6, 7], [*A[:5], 20, 21, 22, 6, 7, 23, 8, 9]
    assert users.serve(A[:5], [20, 21, 22]) == (0, 5)
    assert users.serve(first, [23]) == (7, 3)
    assert users.serve(second) == (10, 3)
    assert users.shape == "0-12"


@everyone
def test_a_checkpoint_stays_when_nothing_else_needs_it(family: str) -> None:  # scenario 52
    users = Conversation(family, "trie", policy=At(4))
    longer = [*A[:5], 20, 21, 8, 9]
    assert users.serve(A[:5], [20, 21]) == (0, 5)
    assert users.serve(longer) == (6, 3)
    # Layers that can be cut anywhere are not stopped for restore points.
    assert users.shape == ("0-8" if family == "K" else "0-4* [4-8]")
    assert users.serve([*A[:4], 15, 16], [31]) == (4, 2)
    assert users.serve([*longer, 10]) == (8, 2)
    assert users.shape == ("0-4 [4-6 4-9]" if family == "K" else "0-4* [4-6 4-9]")


@pytest.mark.parametrize(
    ("family", "retries", "probe"),
    # S stops at restore points as R does, where Ollama's window was captured inside a forward: there 18/29, 36/11.
    [("K", [(18, 29), (36, 11)], 17), *((family, [(24, 23), (40, 7)], 16) for family in "SRP")],
)
def test_a_cancelled_prefill_is_continued(family: str, retries: list[Pair], probe: int) -> None:  # scenario 54
    users = Conversation(family, "trie", chunk=9, policy=Every(8))
    sessions = [users.cancelled_prefill(LONG, until=at) for at in (18, 36)]
    sessions.append(users.cancelled_prefill(LONG))
    assert [(session.cached, len(session.remaining)) for session in sessions] == [(0, 47), *retries]
    assert users.serve([*LONG[:17], *range(100, 110)]) == (probe, 27 - probe)
    assert users.serve([*LONG[:17], *range(200, 210)]) == (17, 10)


@by_family([(0, 40), (13, 27), (41, 2)], [(0, 40), (8, 32), (41, 2)])
def test_an_edit_computes_what_follows_it(family: str, expected: list[Pair]) -> None:  # scenario 60
    users = Conversation(family, "trie", policy=Every(8))
    prompt = LONG[:40]
    edited = [*prompt[:13], 99, *prompt[14:]]
    served = [users.serve(prompt, [60, 61]), users.serve(edited, [62]), users.serve([*prompt, 60, 61, 63])]
    assert served == expected
    assert users.serve([*prompt[:13], 98]) == (13, 1)


@by_family([(20, 20), (20, 20)], [(16, 24), (20, 20)])
def test_the_third_to_part_at_a_place_starts_there(family: str, expected: list[Pair]) -> None:  # scenario 63
    users = Conversation(family, "trie", policy=Every(8))
    users.serve(LONG[:30])
    served = [users.serve([*LONG[:20], *range(base, base + 20)]) for base in (100, 200)]
    assert served == expected


@pytest.mark.parametrize(("family", "fresh"), [("K", {3, 7}), ("S", {3, 5, 7}), ("R", {3, 5, 7}), ("P", {3, 5, 7})])
def test_only_what_was_used_becomes_recent(family: str, fresh: set[int]) -> None:  # scenario 67
    """A use refreshes the whole path, and nothing beside it."""
    users = Conversation(family, "trie", policy=At(3, 5))
    users.serve([*A[:5], 6])
    users.serve([1, 2, 3, 14, 15, 16])
    for node in users.nodes:
        node.used = -1
    users.serve([*A[:5], 7, 8, 9])
    assert {node.end for node in users.nodes if node.used >= 0} == fresh


@pytest.mark.parametrize(
    ("family", "miss"),
    [("K", Miss.NONE), ("S", Miss.WINDOW_PASSED), ("R", Miss.NON_TRIMMABLE), ("P", Miss.NON_TRIMMABLE)],
)
def test_the_reason_for_resuming_before_the_match_is_reported(family: str, miss: Miss) -> None:
    users = Conversation(family, "trie")
    users.turn(A)
    session = users.turn([*A[:5], 9])
    assert (session.matched, session.cached, session.miss) == (5, 5 if family == "K" else 0, miss)


def following(users: Conversation, prompt: list[int], answered: list[int], most: int = 9) -> list[int]:
    """Returns the drafts that the cache has for a session of this prompt, after a part of its answer."""
    session = users.cache.begin(prompt)
    for token in answered:
        session.record(token)
    try:
        return session.continuation(most)
    finally:
        session.recorded[len(prompt) :] = []  # its layers have seen none of these
        session.close()


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_a_prompt_that_was_answered_goes_on_with_its_answer(family: str) -> None:
    users = Conversation(family, "trie")
    users.serve(A[:5], SAID)
    seen = SAID[:-1]  # by the layers; of the last token nothing is known but its name
    assert following(users, A[:5], []) == seen
    assert following(users, A[:5], SAID[:2]) == seen[2:]
    assert following(users, A[:5], [], most=2) == SAID[:2]
    assert following(users, A[:5], SAID) == []


def test_pictures_end_a_continuation() -> None:
    users = Conversation("K", "trie")
    users.serve([*A[:5], 20, -3, -3, 30], [31])
    assert following(users, A[:5], []) == [20]
