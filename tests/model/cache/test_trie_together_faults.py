"""Faults in the trie cache while several sessions are open.

A fault is an exception in the k-th call of something that allocates. The session that meets it ends. The trie is given
up if a change may be half done; then the other sessions are detached: they go on with their own layers. The next
request is right.
"""

from collections.abc import Callable
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache import resume
from runner.cache.layers.snapshot import SliceSnapshot
from runner.cache.sequence import SequenceLayers
from runner.cache.sequences import LiveSequences
from runner.cache.trie import PrefixTrie
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import tiny, words
from tests.lib.breaking import breaking
from tests.lib.driver import ask, ask_uncached, check_equal
from tests.lib.fakes import FAMILIES, FakeKVState, FakeRecurrentState, FakeSlice, FakeState, FakeWindowState
from tests.lib.memory import exact_memory, held_bytes
from tests.lib.story import Every
from tests.lib.together import BrokenError, Client, Together

PREFIX = list(range(1, 49))
everyone = pytest.mark.parametrize("family", FAMILIES)

PLACES: list[tuple[str, type, str]] = [
    ("K", FakeKVState, "copy_tokens"),
    ("R", FakeKVState, "restore"),
    ("K", FakeKVState, "snapshot"),
    ("R", FakeSlice, "split"),
    ("K", FakeSlice, "after"),
    ("S", FakeWindowState, "copy_tokens"),
    ("S", FakeWindowState, "restore"),
    ("S", FakeWindowState, "snapshot"),
    ("P", FakeRecurrentState, "copy_tokens"),
    ("R", FakeRecurrentState, "restore"),
    ("R", FakeState, "split"),
    ("P", FakeState, "after"),
    ("R", SequenceLayers, "evaluate"),
    ("K", SequenceLayers, "rewind"),
    ("R", SequenceLayers, "reset"),
    ("K", SequenceLayers, "measure"),
    ("R", PrefixTrie, "extend"),
    ("K", PrefixTrie, "split"),
    ("R", PrefixTrie, "merge"),
    ("K", PrefixTrie, "remove"),
    ("R", PrefixTrie, "drop"),
    ("K", PrefixTrie, "unlock"),
    ("R", LiveSequences, "hand_over_shared"),
    ("K", LiveSequences, "release"),
]


class Crowd:
    """A story of five clients; one that meets a fault ends there."""

    def __init__(self, family: str) -> None:
        self.users = Together(family, policy=Every(8), budget=420, chunk=9)
        self.clients: dict[str, Client] = {}

    def run(self) -> None:
        """Resumes, splits, merges, pages out, shares with open sessions, evicts, and ends sessions in every way."""
        self._begin("a", PREFIX)
        self._step("a", lambda client: client.say(7, 8).close())
        self._begin("b", [*PREFIX, 7, 8, *range(100, 120)])
        self._begin("c", [*PREFIX[:37], *range(200, 230)])
        self._step("b", lambda client: client.read(chunks=1))
        self._step("c", lambda client: client.read(chunks=1))
        self.users.follows([*PREFIX[:37], *range(200, 240)])
        self.users.follows([*PREFIX, 7, 8, *range(100, 119), 1])
        self._step("c", lambda client: client.say(5, 6))
        self._begin("d", [*PREFIX[:37], *range(200, 205), 3, 3, 3])
        self.users.reserve(200)
        self._step("b", lambda client: client.say(5))
        self._step("c", lambda client: client.forward_unread(4).close())
        self.users.reserve(0)
        self._step("d", lambda client: client.read(chunks=1).fail())
        self._begin("e", [*PREFIX[:20], *range(300, 380)])
        self._step("e", lambda client: client.say(1).close())
        self._step("b", lambda client: client.say(6, 7).close())

    def _begin(self, name: str, prompt: list[int]) -> None:
        self.clients[name] = self.users.begin(prompt)

    def _step(self, name: str, do: Callable[[Client], object]) -> None:
        client = self.clients[name]
        if client not in self.users.clients:
            return
        try:
            do(client)
        except MemoryError:
            client.close()


@pytest.mark.parametrize(("family", "where", "name"), PLACES)
def test_whatever_breaks_the_others_go_on(family: str, where: type, name: str) -> None:
    """`Together` checks every step of every client, before and after."""
    at, reached = 0, True
    while reached:
        crowd = Crowd(family)
        with breaking(where, name, at) as calls:
            crowd.run()
        users = crowd.users
        assert users.clients == []
        for prompt in ([*PREFIX, 7, 8, 1], [*PREFIX[:37], *range(200, 220)], PREFIX):
            users.turn(prompt)
        assert users.cached([*PREFIX, 20, 21, 5]) == len(PREFIX) + 2
        users.cache.detach()
        assert (users.cache.nbytes, users.shape) == (0, "")
        reached = len(calls) > at
        at += 1 + at // 2
    assert at > 1, "the story never came there"


@everyone
def test_sharing_and_evicting_raise_nothing(family: str) -> None:
    """They are there for others, who have done nothing wrong."""
    for ask_for in ("follows", "reserve"):
        users = Together(family, budget=10_000)
        users.turn(PREFIX)
        clients = [users.begin([*PREFIX, 20, 21, *range(100 * user, 100 * user + 9)]) for user in (1, 2)]
        with breaking(PrefixTrie, "match"), breaking(TrieCache, "enforce_budget"):
            if ask_for == "follows":
                assert not users.follows([*PREFIX, 1])
            else:
                users.reserve(10_000)
        assert all(client.session.detached for client in clients)
        assert users.shape == ""
        users.reserve(0)
        for client in clients:
            client.say(5, 6).close()


@everyone
def test_a_resume_that_fails_twice_opens_no_session(family: str) -> None:
    users = Together(family)
    end = users.turn(PREFIX).recorded
    running = users.begin([*end, 1])
    with breaking(TrieCache, "_restore", error=BrokenError), pytest.raises(BrokenError):
        users.begin([*end, 2])
    users.check()
    assert running.session.detached
    running.say(5).close()
    assert users.turn(PREFIX).cached == 0
    assert users.cached([*PREFIX, 20, 21, 9]) == len(end)


def test_what_a_cut_left_half_done_is_free_at_once() -> None:
    """One half of a node is live in the layers of a session, and in no node: when the session closes it goes."""
    model = tiny("llama")
    for seed in (1, 3):
        ask_uncached(model, words(90, seed))
    with exact_memory():
        before = held_bytes()
        cache = TrieCache(model.facts)
        sessions = [cache.begin(words(60)), cache.begin(words(90, 3))]
        for session in sessions:
            with session.forward(55):
                model.model(mx.array([session.recorded[:55]]), cache=session.layers)
            mx.eval(session.state())
        assert not cache.follows(words(51))
        quiet = patch("runner.cache.trie_cache.log")  # pytest would keep what is logged, and the error with it
        with breaking(SliceSnapshot, "_like", 1), quiet:
            last = cache.begin([*words(45), 63, 63])
        assert last.cached == 0
        for session in (*sessions, last):
            session.close()
        cache.detach()
        del session, last
        sessions.clear()
        assert cache.nbytes == 0
        assert held_bytes() <= before + 4096


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next", "mamba2"])
def test_memory_returns_after_a_trie_was_given_up(kind: str) -> None:
    """Detached sessions hold their own layers, which are counted, and freed when they close."""
    model = tiny(kind)
    ask_uncached(model, words(90))
    with exact_memory():
        before = held_bytes()
        cache = TrieCache(model.facts)
        for seed in (1, 2):
            ask(model, cache, words(80, seed))
        detached = cache.begin([*words(80), 1])
        quiet = patch("runner.cache.trie_cache.log")
        with patch.object(resume, "restore_to", side_effect=MemoryError), quiet, pytest.raises(MemoryError):
            cache.begin([*words(80, 2), 1])
        assert cache.nbytes == detached.sequence.nbytes
        assert held_bytes() <= before + cache.nbytes + 4096
        detached.close()
        del detached
        assert cache.nbytes == 0
        assert held_bytes() <= before + 4096
        check_equal(model, ask(model, cache, words(80)), ask_uncached(model, words(80)))
