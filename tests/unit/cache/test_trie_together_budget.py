"""The budget of the trie cache while several sessions are open, over fake layers.

A token is a byte in each layer of tokens, and a recurrent state 16. The layers of open sessions are never taken from
them, nor their last checkpoints; all else goes, the sequence that was kept first.
"""

import pytest

from tests.lib.fakes import FAMILIES, STATE_BYTES
from tests.lib.story import Every
from tests.lib.together import Client, Together, own

PREFIX = list(range(1, 13))
everyone = pytest.mark.parametrize("family", FAMILIES)
TOKEN = {"K": 2, "S": 1, "R": 1, "P": 0}
"""Bytes of a token, by family."""
STATE = {"K": 0, "S": 4, "R": STATE_BYTES, "P": 2 * STATE_BYTES}
"""Bytes of the state at the end of a node, by family."""
MUCH = 10_000


def crowd(family: str, budget: int | None = None) -> tuple[Together, list[Client]]:
    """Returns users with four cached conversations, two of them open again; the sequence of a fifth was kept last."""
    users = Together(family, budget=budget, policy=Every(8))
    ends = [users.turn([*PREFIX, *own(user)]).recorded for user in (1, 2, 3, 4)]
    clients = [users.begin([*ends[place], *own(place + 7)]).read(chunks=1) for place in (0, 2)]
    users.turn(own(5, 20))
    assert users.cache.sequences.end is not None
    return users, clients


@everyone
def test_all_goes_but_what_is_in_use(family: str) -> None:
    users, clients = crowd(family)
    in_use = {node for client in clients for node in client.session.node.path()}
    assert {node for node in users.nodes if node.locks} == {node for node in in_use if node.parent}
    before = users.cache.nbytes
    users.bound(1)
    assert all(node.locks for node in users.nodes)
    assert all(client.session.node in users.nodes for client in clients)
    assert users.cache.sequences.end is None
    layers = sum(client.session.sequence.nbytes for client in clients)
    points = len(clients) + 1  # where each stands, and where the two part
    assert layers <= users.cache.nbytes <= layers + points * STATE[family] < before
    for client in clients:
        client.say(7).close()


@everyone
def test_batches_take_the_room_of_what_is_kept(family: str) -> None:
    users, clients = crowd(family)
    budget = users.cache.nbytes + 64
    users.bound(budget)
    users.reserve(64)
    assert users.cache.nbytes == budget
    users.reserve(65)
    assert users.cache.nbytes <= budget
    users.reserve(MUCH)
    assert all(node.locks for node in users.nodes)
    for client in clients:
        client.say(7)
    users.reserve(0)
    for client in clients:
        client.close()
    assert users.cache.nbytes <= budget


@everyone
def test_the_first_one_is_always_admitted(family: str) -> None:
    users = Together(family, budget=10)
    assert users.cache.admits(10**9)
    users.turn(PREFIX)
    assert users.cache.admits(10**9)
    client = users.begin(PREFIX)
    assert not users.cache.admits(10**9)
    client.close()
    assert users.cache.admits(10**9)


@everyone
def test_a_request_that_would_not_fit_is_not_admitted(family: str) -> None:
    """Running requests count with their whole prompts, read or not; the new one with its prompt and an answer."""
    each = TOKEN[family] * 100 + STATE[family]
    answer = TOKEN[family] * 256
    users = Together(family, budget=3 * each + answer + 10)
    users.turn(PREFIX)
    assert users.cache.session_bytes(100) == each
    users.begin(own(1, 100))
    users.begin(own(2, 100)).read(chunks=2)
    assert users.cache.admits(100)
    assert users.cache.allows(each + answer + 10)
    assert not users.cache.allows(each + answer + 11)
    users.reserve(10)
    assert users.cache.admits(100)
    users.reserve(11)
    assert not users.cache.admits(100)
    assert not users.cache.allows(each + answer)


def test_before_the_first_forward_only_one_comes_in() -> None:
    """It shows how much memory computing takes."""
    users = Together("R", budget=MUCH)
    assert users.cache.admits(20)
    first = users.begin(PREFIX)
    assert users.cache.session_bytes(20) == 20 + STATE_BYTES
    assert not users.cache.admits(20)
    first.read(chunks=1)
    assert users.cache.admits(20)
