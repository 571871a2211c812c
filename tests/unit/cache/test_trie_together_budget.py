"""The budget of the trie cache while several sessions are open, over fake layers.

A token is a byte in each layer of tokens, and a recurrent state 16. What open sessions use is never taken from them;
all else goes, the stack that was kept first.
"""

import logging
from collections.abc import Callable
from itertools import permutations

import pytest

from tests.lib.fakes import FAMILIES, STATE_BYTES
from tests.lib.story import Every
from tests.lib.together import Client, Together

PREFIX = list(range(1, 13))
everyone = pytest.mark.parametrize("family", FAMILIES)
TOKEN = {"K": 2, "S": 1, "R": 1, "P": 0}
"""Bytes of a token, by family."""
STATE = {"K": 0, "S": 4, "R": STATE_BYTES, "P": 2 * STATE_BYTES}
"""Bytes of the state at the end of a node, by family."""
MUCH = 10_000


def own(user: int, count: int = 10) -> list[int]:
    return [user * 100 + word for word in range(count)]


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
    locked = {node: [slot is not None for slot in node.slots] for node in users.nodes if node.locks}
    assert set(locked) == {node for node in in_use if node.parent}
    before = users.cache.nbytes
    users.bound(1)
    assert {node: [slot is not None for slot in node.slots] for node in users.nodes} == locked
    assert users.cache.sequences.end is None
    layers = sum(client.session.sequence.nbytes for client in clients)
    assert users.cache.nbytes == layers + sum(node.nbytes for node in locked) < before
    for client in clients:
        client.say(7).close()


@everyone
def test_what_is_locked_and_what_can_be_evicted_are_all_there_is(family: str) -> None:
    users, clients = crowd(family)
    while clients:
        users.cache.sequences.evict_kept()
        total = users.cache.describe().counts.paged_bytes
        locked = sum(node.nbytes for node in users.nodes if node.locks)
        evictable = sum(node.nbytes for node in users.nodes if not node.locks)
        assert locked + evictable == total
        users.bound(0)
        assert users.cache.describe().counts.paged_bytes == locked
        assert all(node.locks for node in users.nodes)
        users.bound(MUCH)
        clients.pop().say(7).close()


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_the_kept_sequence_is_evicted_first(family: str) -> None:
    """Much of what it holds another one has too."""
    users = Together(family)
    end = users.turn(PREFIX).recorded
    first = users.begin([*end, 1]).start()
    second = users.begin([*end, *own(2)]).say(*own(3))
    second.close()
    before, held = users.cache.nbytes, users.held
    users.bound(before - 1)
    assert users.held == held, "no node had to go"
    assert users.cache.sequences.kept.nbytes == 0
    assert users.cache.nbytes == before - len(end) * TOKEN[family]
    first.say(4).close()
    assert users.cached([*second.seen, 9]) == len(second.seen)


@everyone
def test_what_was_kept_is_copied_out(family: str) -> None:
    users = Together(family)
    running = users.begin(own(1)).read(chunks=1)
    end = users.turn(own(2)).recorded
    users.cache.sequences.evict_kept()
    users.check()
    assert users.cache.sequences.kept.nbytes == 0
    assert users.cached([*end, 1]) == len(end)
    running.say(3).close()


@everyone
def test_others_go_in_the_order_in_which_they_were_used(family: str) -> None:
    users = Together(family)
    running = users.begin(own(9)).read(chunks=1)
    ends = [users.turn(own(user)).recorded for user in (1, 2, 3)]
    assert users.cached([*ends[0], 1]) == len(ends[0])
    users.cache.sequences.evict_kept()
    for left in ({0, 2}, {0}, set()):
        users.bound(users.cache.nbytes - 1)
        assert {node.tokens[0] for node in users.nodes} == {ends[user][0] for user in left}
    running.say(1)


@everyone
def test_a_prompt_drives_out_what_is_kept_and_nothing_that_others_use(family: str) -> None:
    users, clients = crowd(family)
    locked = {node for node in users.nodes if node.locks}
    users.cache.budget_bytes = 1
    users.begin(own(30, 20)).read()
    assert {node for node in users.nodes if node.path()[1].tokens[0] != 3000} == locked
    for client in clients:
        client.say(7).close()


# --- batches


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


def test_more_goes_than_has_to_lest_it_is_asked_again_soon() -> None:
    """Looking at all nodes after every few tokens would hold up a decode."""
    users = Together("K")
    running = users.begin(own(99)).start()
    for user in range(40):
        users.turn(own(user))
    users.cache.sequences.evict_kept()
    budget = users.cache.nbytes
    users.bound(budget)
    users.reserve(1)
    spare = budget // 32
    assert budget - 2 * spare < users.cache.nbytes <= budget - spare < budget - 24, "more than one of 12 tokens"
    running.say(1)


def test_what_cannot_be_had_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    users, clients = crowd("R", budget=MUCH)
    for nbytes in (MUCH, 0, 2 * MUCH):
        users.reserve(nbytes)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["what runs needs more than the cache may hold"]
    assert len(clients) == 2


# --- who may come in


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


@everyone
def test_unused_entries_refuse_no_request(family: str) -> None:
    users = Together(family, budget=MUCH)
    for user in range(5):
        users.turn(own(user, 60))
    users.begin(own(7, 20))
    users.turn(own(8, 20))
    budget = users.cache.nbytes + 1
    users.bound(budget)
    assert users.cache.allows(budget - users.cache.session_bytes(20))
    assert not users.cache.allows(budget - users.cache.session_bytes(20) + 1)


@everyone
def test_without_a_budget_all_come_in(family: str) -> None:
    users = Together(family)
    users.turn(PREFIX)
    users.begin(PREFIX)
    assert users.cache.admits(10**9)
    assert users.cache.allows(10**12)
    users.reserve(10**12)
    assert users.cache.nbytes >= 10**12
    assert len(users.nodes) > 0


def test_before_the_first_forward_only_one_comes_in() -> None:
    """It shows what a session takes."""
    users = Together("R", budget=MUCH)
    assert users.cache.admits(20)
    first = users.begin(PREFIX)
    assert users.cache.session_bytes(20) == 0
    assert not users.cache.admits(20)
    first.read(chunks=1)
    assert users.cache.session_bytes(20) == 20 + STATE_BYTES
    assert users.cache.admits(20)


# --- afterwards


@everyone
@pytest.mark.parametrize("budget", [0, 30, 60, 100])
def test_when_all_are_closed_the_budget_holds(family: str, budget: int) -> None:
    """In every order, some of them cut short; `check` compares the bytes when all are closed."""
    for place, order in enumerate(permutations(range(3))):
        users = Together(family, budget=budget, policy=Every(8))
        clients = [users.begin([*PREFIX, *own(user, 20)]) for user in range(3)]
        for client in clients:
            client.say(7, 8)
        ends: list[Callable[[Client], None]] = [Client.close, Client.fail, Client.close]
        for user in order:
            ends[(user + place) % 3](clients[user])
        assert users.cache.nbytes <= budget
        users.turn([*PREFIX, 5])
        assert budget or (users.cache.nbytes, users.shape) == (0, "")


@everyone
def test_a_budget_of_zero_keeps_no_tokens(family: str) -> None:
    users = Together(family, budget=0)
    clients = [users.begin([*PREFIX, *own(user)]) for user in (1, 2, 3)]
    assert not users.follows([*PREFIX, 1])
    for client in clients:
        client.say(5, 6)
    clients[1].close()
    assert users.cached([*PREFIX, 1]) == 0
    for client in (clients[2], clients[0]):
        client.close()
    assert (users.cache.nbytes, users.shape) == (0, "")
