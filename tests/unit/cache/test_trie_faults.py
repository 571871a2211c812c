"""Faults in the trie cache, over fake layers: the next request is right, whatever broke, and when.

A fault in any call of anything, while others have sessions open, is in tests/model/cache/test_trie_together_faults.py.
Scenarios: docs/internals/cache.md, 8.
"""

import logging

import pytest

from runner.cache.layer_interface import Miss
from runner.cache.sequence import SequenceLayers
from tests.lib.breaking import breaking
from tests.lib.fakes import FAMILIES
from tests.lib.story import Conversation, Every

A = list(range(1, 21))
B = [*A[:10], *range(50, 60)]
everyone = pytest.mark.parametrize("family", FAMILIES)


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


def _with_a_hole() -> Conversation:
    """The keys and values of the first ten tokens are lost; those of what follows them in A are not."""
    users = Conversation("R", "trie")
    users.turn(A)
    users.turn(B)
    users.failed_forward([*B, 20, 21, 30], 0)
    users.trie.trie.remove(users.node([*B, 20, 21]))  # of which only a state was left
    assert users.shape == "0-10* [10-22]"
    above, below = users.nodes
    assert (above.slots[0], above.slots[1] is None, below.slots[0] is None) == (None, False, False)
    return users


def test_tokens_after_a_gap_are_not_merged_with_it() -> None:
    """Joined, they would not be the edge: a later request would resume with the wrong tokens."""
    users = _with_a_hole()
    users.trie.trie.merge(users.nodes[0])
    users.check_trie(None)
    assert users.nodes[0].slots[0] is None
    assert users.turn([*A, 20, 21, 30]).cached == 0


def test_a_gap_is_filled_by_the_next_request_through_it() -> None:
    users = _with_a_hole()
    assert users.turn([*A, 20, 21, 30]).cached == 0
    assert all(slot is not None for node in users.nodes for slot in node.slots)
    assert users.turn([*A, 20, 21, 30, 20, 21, 31]).cached == 25


def test_what_cannot_be_kept_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    users = Conversation("K", "trie")
    with breaking(SequenceLayers, "evaluate", 0), caplog.at_level(logging.ERROR):
        users.turn(A)
    assert caplog.records[-1].message == "cache freed: a conversation could not be kept"
    assert users.turn(A).miss == Miss.EMPTY
