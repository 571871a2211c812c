"""Several sessions of the trie cache at once, over fake layers: each has layers of its own, what they compute is kept
once. `Together` checks all of it after every step of anybody.

Families: K keys and values only, S with a window of 4, R with a recurrent layer, P recurrent layers only.
"""

import random
from collections.abc import Callable, Sequence
from itertools import permutations, product

import pytest

from runner.cache.interface import Miss
from tests.lib.fakes import FAMILIES, FakeKV
from tests.lib.story import At, BranchOnly, Every
from tests.lib.together import Client, Together

PREFIX = list(range(1, 41))
everyone = pytest.mark.parametrize("family", FAMILIES)


def own(user: int, count: int = 6) -> list[int]:
    """Returns tokens that only this user says."""
    return [user * 100 + word for word in range(count)]


def distinct(conversations: Sequence[Sequence[int]]) -> int:
    """Returns the number of distinct prefixes of some conversations."""
    return len({tuple(tokens[: end + 1]) for tokens in conversations for end in range(len(tokens))})


def entries(users: Together) -> int:
    """Returns the number of tokens that nodes and kept layers hold in a layer of tokens, without spare room."""
    slots = [slot for slot, kind in enumerate(users.kinds) if kind is FakeKV]
    kept = users.cache.sequences.kept
    owned = sum(held.nbytes for node in users.nodes for slot in slots if (held := node.slots[slot]) is not None)
    return (owned + len(slots) * kept.position) // max(1, len(slots))


def weave(users: Together, prompts: Sequence[list[int]], answers: Sequence[list[int]], seed: int) -> list[Client]:
    """All conversations, at the same time, in some order of their steps."""
    draw = random.Random(seed)
    waiting = list(zip(prompts, answers, strict=True))
    running: list[tuple[Client, list[int]]] = []
    done = []
    while waiting or running:
        if waiting and (not running or draw.random() < 0.4) and not users.follows(waiting[0][0]):
            prompt, answer = waiting.pop(0)
            running.append((users.begin(prompt), [*answer]))
            continue
        client, answer = one = draw.choice(running)
        if client.session.next_forward(users.chunk):
            client.read(chunks=1)
        elif answer:
            client.say(answer.pop(0))
        else:
            client.close()
            running.remove(one)
            done.append(client)
    return done


# --- what everybody reads and keeps


@everyone
@pytest.mark.parametrize("seed", range(12))
def test_conversations_that_overlap_are_never_mixed(family: str, seed: int) -> None:
    """Two to four, which share a prefix of any length, and go on from each other's answers afterwards."""
    draw = random.Random(seed)
    users = Together(family, policy=draw.choice([BranchOnly(), Every(8)]), chunk=draw.choice([1, 5, 16]))
    count = draw.randint(2, 4)
    shared = [draw.choice([40, 40, 34, 10, 0]) for _ in range(count)]
    prompts = [[*PREFIX[:at], *own(user, draw.randint(1, 9))] for user, at in enumerate(shared, 1)]
    answers = [own(user + 50, draw.randint(0, 4)) for user in range(count)]
    for _ in range(2):
        clients = weave(users, prompts, answers, draw.randrange(1000))
        for client in clients:
            assert users.cached([*client.seen, 999]) == len(client.seen)
        recorded = [client.session.recorded for client in clients]
        prompts = [[*draw.choice(recorded), *own(user + 60, draw.randint(1, 5))] for user in range(count)]


@everyone
def test_what_another_uses_is_copied(family: str) -> None:
    """Both go on from one end, one after the other or at once; the first one there moves it, the second copies it."""
    users = Together(family)
    end = users.turn(PREFIX).recorded
    clients = [users.begin([*end, *own(1)])]
    live = clients[0].session.sequence.live()
    assert live
    clients += [users.begin([*end, *own(user)]) for user in (2, 3)]
    assert [client.session.cached for client in clients] == [len(end)] * 3
    assert clients[0].session.sequence.live() == live
    for client in reversed(clients):
        client.say(7, 8)
    for client in clients:
        client.close()
    assert all(users.cached([*end, *own(user), 7, 8, 9]) == len(end) + 8 for user in (1, 2, 3))


@everyone
def test_other_salts_share_nothing_at_the_same_time(family: str) -> None:
    users = Together(family)
    first = users.begin(PREFIX).say(20)
    second = users.begin(PREFIX, "other").say(21)
    first.close()
    assert users.begin(PREFIX, "other").session.cached == 0, "what runs is not kept yet"
    second.close()
    third = users.begin([*PREFIX, 21, 1], "other")
    assert third.session.cached == 41
    assert users.begin([*PREFIX, 21, 1], "third").session.miss == Miss.SALT


@everyone
def test_a_sequence_made_before_the_first_forward_knows_the_used_layers(family: str) -> None:
    """It is kept when its request leaves before it ran at all, and finds what another one has stored meanwhile."""
    users = Together(family, policy=Every(8))
    early = users.begin(own(1))
    end = users.turn(PREFIX).recorded
    early.close()
    assert users.turn([*end, 1]).cached == len(end)


@everyone
def test_nothing_is_read_from_a_session_that_has_not_kept_it_yet(family: str) -> None:
    """Without `follows`, a session that begins meanwhile computes it again, but it is stored once."""
    users = Together(family)
    first = users.begin([*PREFIX, *own(1)]).read()
    second = users.begin([*PREFIX, *own(2)])
    assert (second.session.matched, second.session.miss) == (0, Miss.EMPTY)
    first.say(7).close()
    second.say(8).close()
    assert entries(users) == (distinct([first.seen, second.seen]) if family != "P" else 0)


# --- bytes


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


@everyone
@pytest.mark.parametrize("seed", range(8))
def test_each_token_is_held_once_when_all_are_closed(family: str, seed: int) -> None:
    """And the entries are as many as if they had run one after the other."""
    draw = random.Random(seed)
    prompts = [[*PREFIX[: draw.choice([40, 40, 36])], *own(user, draw.randint(1, 9))] for user in range(1, 5)]
    answers = [own(user + 50, draw.randint(1, 4)) for user in range(4)]
    users = Together(family, policy=draw.choice([BranchOnly(), Every(8)]))
    clients = weave(users, prompts, answers, seed)
    after = Together(family, policy=BranchOnly())
    for prompt, answer in zip(prompts, answers, strict=True):
        after.turn(prompt, answer)
    if family != "P":
        assert entries(users) == entries(after) == distinct([client.seen for client in clients])
    if family == "K":
        room = users.cache.sequences.kept.nbytes - 2 * users.cache.sequences.kept.position
        assert users.cache.nbytes - room == 2 * entries(users)


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
    assert users.cache.describe().counts.paged_bytes == owned


def test_tokens_of_several_sequences_are_kept_once() -> None:
    """The first 40 tokens are live in one sequence and the next in another when a third request merges their nodes."""
    users = Together("K", chunk=40)
    prefix = list(range(100))
    first = users.begin([*prefix, *own(1)]).read(until=40)
    users.follows([*prefix[:40], 7])
    users.follows([*prefix[:80], 7])  # the first one is to stop there
    users.turn([*prefix, *own(2)])
    first.read()
    users.turn([*prefix[:90], 7], [])
    first.say().close()
    assert entries(users) == distinct([[*prefix, *own(1)], [*prefix, *own(2), 20, 21], [*prefix[:90], 7]])


# --- ends

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
    """Every end in every order. `check` sees to layers, locks and snapshots; what is kept of others stays kept."""
    for phase, (order, ends) in enumerate(product(permutations(range(3)), permutations(ENDS, 2))):
        users = Together(family, policy=BranchOnly() if phase % 2 else Every(8))
        clients = three(users, phase)
        for place, name in zip(order, [*ends, "close"], strict=True):
            ENDS[name](clients[place])
        last = clients[order[2]]
        assert not last.session.detached
        assert users.cached([*last.seen, 999]) == len(last.seen)
        assert all(not node.locks for node in users.nodes)


@everyone
def test_what_others_hold_survives_a_failure(family: str) -> None:
    """Tokens that only the failed session held are lost; those that others hold too are live in the layers of one."""
    users = Together(family)
    clients = three(users, 2)  # the first one says something, the second has read nothing, the third a chunk
    before = users.held
    clients[0].fail()
    after = users.held
    assert after == {key: content for key, content in before.items() if len(key[0]) <= 42}
    assert all(key[0] == (*PREFIX, 20, 21) for key in after)
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


@everyone
def test_the_last_one_to_close_is_kept(family: str) -> None:
    for order in permutations(range(3)):
        users = Together(family)
        clients = three(users, 0)
        for place in order:
            clients[place].say(7).close()
            assert users.cache.sequences.kept is clients[place].session.sequence
            assert users.cache.sequences.end is not None
        assert users.cache.sequences.kept.position == len(clients[order[2]].seen)


@everyone
def test_the_next_session_gets_the_kept_sequence(family: str) -> None:
    users = Together(family)
    end = users.turn(PREFIX).recorded
    kept = users.cache.sequences.kept
    first, second = users.begin([*end, 1]), users.begin([*end, 2])
    assert (first.session.sequence is kept, second.session.sequence is kept) == (True, False)
    second.say().close()
    third = users.begin([*end, 3])
    assert third.session.sequence is second.session.sequence
    first.close()
    third.close()
    assert users.cache.sequences.kept is third.session.sequence


def test_expired_checkpoints_stay_while_another_request_uses_them() -> None:
    """Only nodes without a lock are merged."""
    users = Together("R", policy=At(8))
    long = list(range(30))
    leader = users.begin(long).read()
    resumed = users.begin([*long[:8], 99, 98])
    assert resumed.session.cached == 8
    leader.say(1).close()
    users.cache.policy = BranchOnly()
    users.turn([*long, 1, 2])
    assert any(node.end == 8 for node in users.nodes)
    resumed.say(3).close()
