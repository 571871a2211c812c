"""A prompt that waits for what another session is about to compute, and what is shared with one that is past it.

Over fake layers; `WORTH` tokens are the least that is waited for. Families: K keys and values only, S with a window, R
with a recurrent layer, P recurrent layers only.
"""

from collections.abc import Callable

import pytest

from tests.lib.fakes import FAMILIES
from tests.lib.together import Client, Together

PREFIX = list(range(1, 61))
LATER = list(range(300, 320))
everyone = pytest.mark.parametrize("family", FAMILIES)


def leader(users: Together) -> Client:
    return users.begin([*PREFIX, *LATER])


@everyone
def test_the_leader_stops_for_each_of_its_followers(family: str) -> None:
    users = Together(family, chunk=100)
    first = leader(users)
    stops = (50, 40, 60, 40)
    assert all(users.follows([*PREFIX[:stop], 7]) for stop in stops)
    positions = []
    while first.session.next_forward(100):
        positions.append(first.read(chunks=1).session.position)
    assert positions == [40, 50, 60, 79]
    assert users.shape == "0-40* [40-50* [50-60*]]"
    for stop in stops:
        assert users.begin([*PREFIX[:stop], 7]).session.cached == stop


@pytest.mark.parametrize("said", [0, 1, 3])
@everyone
def test_what_a_leader_has_read_is_shared_at_once(family: str, said: int) -> None:
    """In the middle of its prompt, at its end, in the middle of its answer: if all layers can be cut anywhere."""
    users = Together(family)
    first = leader(users)
    if said:
        first.say(*range(20, 20 + said))
    else:
        first.read(until=65)
    assert not users.follows([*PREFIX, 7])
    assert users.begin([*PREFIX, 7]).session.cached == (60 if family == "K" else 0)
    assert users.shape == ("0-60" if family == "K" else "")
    first.say(30).close()


@everyone
def test_an_answer_is_not_waited_for(family: str) -> None:
    """In a batch the layers of a session stand still while it decodes, for an unknown time."""
    users = Together(family)
    first = users.begin(PREFIX).start()
    for token in [*LATER, *range(400, 440)]:
        first.record(token)
    prompt = [*first.session.recorded, 7]
    assert not users.follows(prompt)
    assert users.begin(prompt).session.cached == (60 if family == "K" else 0)


@everyone
def test_another_salt_is_never_waited_for(family: str) -> None:
    users = Together(family)
    first = leader(users)
    assert not users.follows(PREFIX, "other")
    second = users.begin(PREFIX, "other")
    assert users.follows(PREFIX, "other")
    assert first.session.checkpoints == []
    first.read()
    assert users.follows(PREFIX, "other"), "the first one's way is another"
    second.read()
    assert not users.follows(PREFIX, "other")


@everyone
@pytest.mark.parametrize(
    ("end", "cached"), [(Client.close, 20), (Client.fail, 0), (Client.fail_in_layers, 0), (Client.fail_in_cache, 0)]
)
def test_a_closed_session_is_not_waited_for(family: str, end: Callable[[Client], None], cached: int) -> None:
    users = Together(family)
    first = leader(users)
    assert users.follows([*PREFIX, 7])
    first.read(until=20)
    end(first)
    assert not users.follows([*PREFIX, 7])
    assert users.begin([*PREFIX, 7]).session.cached == cached


@everyone
def test_a_chain_of_followers_computes_every_token_once(family: str) -> None:
    """Eight prompts at once, each of which waits for what another one of them computes."""
    users = Together(family, chunk=16)
    prompts = [[*PREFIX, *[500 + user] * (user % 3), *range(600 + user, 610 + user)] for user in range(8)]
    waiting = list(prompts)
    clients: list[Client] = []
    computed = 0
    while waiting or any(client.session.next_forward(16) for client in clients):
        while waiting and not users.follows(waiting[0]):
            clients.append(users.begin(waiting.pop(0)))
            computed -= clients[-1].session.position
        for client in clients:
            client.read(chunks=1)
    for client in clients:
        client.start()
    computed += sum(client.session.position for client in clients)
    assert computed == 60 + sum(len(prompt) - 60 for prompt in prompts)
    for client in clients:
        client.close()
    assert [users.cached([*prompt, 1]) for prompt in prompts] == [len(prompt) for prompt in prompts]
