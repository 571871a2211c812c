"""Several sessions of the trie cache at once, over fake layers: each has layers of its own, what they compute is kept
once. `Together` checks all of it after every step of anybody.

Families: K keys and values only, S with a window of 4, R with a recurrent layer, P recurrent layers only.
"""

from collections.abc import Callable
from itertools import cycle, permutations

import pytest

from runner.cache.session import TrieSession
from runner.numbers.cache import cache_nodes
from tests.lib.fakes import FAMILIES, FakeKV
from tests.lib.story import BranchOnly, Every
from tests.lib.together import Client, Together, own

PREFIX = list(range(1, 41))
everyone = pytest.mark.parametrize("family", FAMILIES)


@everyone
def test_what_two_share_is_held_twice_while_they_run_and_once_afterwards(family: str) -> None:
    users = Together(family)
    end = users.turn(PREFIX).recorded
    once = users.cache.nbytes
    assert once == len(end) * users.kinds.count(FakeKV) + sum(
        4 if kind.__name__ == "FakeWindow" else 16 for kind in users.kinds if kind is not FakeKV
    )
    first = users.begin([*end, 1])
    assert users.cache.nbytes == once
    second = users.begin([*end, 2])
    assert users.cache.nbytes == 2 * once, "a copy, and nothing beside"
    first.say().close()
    second.say().close()
    # A token of each; what was live at the common end, and the end of the first one, copied out: of a window one token.
    assert users.cache.nbytes == once + {"K": 2 * 2, "S": 2 + 4 + 1, "R": 2 + 2 * 16, "P": 2 * 2 * 16}[family]


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_an_open_session_takes_over_what_it_shares(family: str) -> None:
    """The kept sequence is evicted: tokens that the next one holds too become live there, without a copy."""
    users = Together(family)
    end = users.turn(PREFIX).recorded
    first, second = users.begin([*end, 1]).say(), users.begin([*end, 2]).say()
    first.close()
    second.close()
    shared = users.nodes[0]
    assert shared.slots[0] is not None
    assert shared.slots[0].live
    owned = {"K": 2, "S": 1 + 4 + 1, "R": 1 + 16 + 16}[family]  # the first one's own token, states of the two ends
    assert users.cache.paged_bytes == owned


def talks(users: Together, begin: list[int]) -> list[TrieSession]:
    """Two conversations that ran at once, with one beginning; the second was kept last."""
    clients = [users.begin([*begin, *own(user, 20)]).say(7) for user in (1, 2)]
    for client in clients:
        client.close()
    return [client.session for client in clients]


@everyone
def test_conversations_that_take_turns_keep_their_layers(family: str) -> None:
    users = Together(family)
    last = talks(users, [])
    for turn in range(3):
        for place, session in enumerate(last):
            last[place] = users.turn([*session.recorded, turn])
            assert last[place].sequence is session.sequence
            assert last[place].cached == len(session.recorded)
    assert users.cache.sequences.totals.restored_bytes == 0
    assert users.cache.paged_bytes == 0 or family != "K"


@everyone
def test_as_many_conversations_keep_their_layers_as_ran_at_once(family: str) -> None:
    """Another one takes those that have been idle for longest, and the same conversation finds them wherever it is."""
    users = Together(family)
    first, second = talks(users, [])
    third = users.turn(own(3, 20))
    assert third.sequence is first.sequence
    assert users.turn([*second.recorded, 8]).sequence is second.sequence
    assert users.cached([*first.recorded, 8]) == len(first.recorded)
    assert len(users.cache.sequences.all) == 2
    assert not any(node.locks for node in cache_nodes(users.cache)), "no request is under way"


@everyone
def test_parked_layers_go_first_where_memory_is_short(family: str) -> None:
    users = Together(family)
    first, second = talks(users, [])
    assert users.cache.sequences.parked == {first.sequence: first.node}
    users.bound(users.cache.nbytes - 1)
    assert not users.cache.sequences.parked
    assert users.turn([*second.recorded, 8]).sequence is second.sequence


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_parked_layers_take_over_what_they_share(family: str) -> None:
    """The session that held it before fails."""
    users = Together(family)
    first, second = talks(users, PREFIX[:8])
    shared = users.nodes[0]
    users.begin([*second.recorded, 8]).fail()
    assert first.sequence in users.cache.sequences.parked
    assert users.nodes == first.node.path()[1:]
    assert shared.slots[0] in first.sequence.live()


ENDS: dict[str, Callable[[Client], None]] = {
    "close": Client.close,
    "ahead": lambda client: client.forward_unread(77).close(),
    "cancel": lambda client: client.read(chunks=1).close(),
    "fail": Client.fail,
    "layers": Client.fail_in_layers,
}


def three(users: Together, phase: int) -> list[Client]:
    """Three who share a prefix that is kept, in the middle of their prompts or answers."""
    end = users.turn(PREFIX).recorded
    clients = [users.begin([*end, *own(user, 12)]) for user in (1, 2, 3)]
    for place, client in enumerate(clients):
        if (place + phase) % 3 == 1:
            client.read(chunks=1)
        elif (place + phase) % 3 == 2:
            client.say(7, 8)
    return clients


@everyone
def test_the_end_of_one_session_leaves_the_others_alone(family: str) -> None:
    """Every two ends, in any order. `check` sees to layers, locks and snapshots; what is kept of others stays kept."""
    for phase, (order, ends) in enumerate(zip(cycle(permutations(range(3))), permutations(ENDS, 2), strict=False)):
        users = Together(family, policy=BranchOnly() if phase % 2 else Every(8))
        clients = three(users, phase)
        for place, name in zip(order, [*ends, "close"], strict=True):
            ENDS[name](clients[place])
        last = clients[order[2]]
        assert not last.session.detached
        assert users.cached([*last.seen, 999]) == len(last.seen)
        assert not any(node.locks for node in cache_nodes(users.cache))


@everyone
def test_what_others_hold_survives_a_failure(family: str) -> None:
    """Tokens that only the failed session held are lost; those that others hold too are live in the layers of one."""
    users = Together(family)
    clients = three(users, 2)  # the first one says something, the second has read nothing, the third a chunk
    before = users.held
    clients[0].fail()
    after = users.held
    assert after == {key: content for key, content in before.items() if len(key[0]) <= 42}
    assert all(key[0] == (*PREFIX, 20, 21)[: len(key[0])] for key in after)
    clients[2].fail()
    assert users.held == after
    clients[1].fail()
    kept = {key: content for key, content in after.items() if users.kinds[key[1]] is not FakeKV}
    assert users.held == kept, "windows and states had been copied out, keys and values nobody has"


@everyone
def test_sessions_keep_their_layers_when_the_trie_is_given_up(family: str) -> None:
    for place in range(3):
        for phase in range(3):
            users = Together(family)
            clients = three(users, phase)
            clients[place].fail_in_cache()
            others = [client for client in clients if client is not clients[place]]
            assert users.nodes == []
            assert all(client.session.detached for client in others)
            end = users.turn([*PREFIX, 7]).recorded
            for client in others:
                client.say(5, 6)
            others[0].fail()
            others[1].close()
            assert users.cached([*end, 999]) == len(end), "a detached session keeps nothing, and frees nothing"
            assert users.cached([*others[1].seen, 1]) == (0 if family in "SRP" else 40)
