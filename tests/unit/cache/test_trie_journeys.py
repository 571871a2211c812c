"""The trie cache over fake layers, along many turns: how far before the match a request is resumed at most.

Random but seeded; every turn is checked in full by `Conversation`.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import random
from collections.abc import Sequence

import pytest

from runner.cache.checkpoints import TurnCheckpoints
from tests.lib.fakes import FAMILIES
from tests.lib.story import At, CancelledError, Conversation, Every

INTERVAL = 8
BEFORE_END = 4
everyone = pytest.mark.parametrize("family", FAMILIES)
seeds = pytest.mark.parametrize("seed", range(3))


class Writer:
    """Makes up tokens of which none is said twice, so that prompts part exactly where they are meant to."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.said = 0

    def words(self, least: int, most: int) -> list[int]:
        count = self.draw.randint(least, most)
        self.said += count
        return list(range(self.said - count, self.said))


@everyone
@seeds
def test_ten_turns_are_resumed_near_where_they_part(family: str, seed: int) -> None:  # scenario 64
    """Clients keep an answer, or drop its end, or its beginning; another client asks in between."""
    users, writer = Conversation(family, "trie", policy=Every(INTERVAL, BEFORE_END)), Writer(seed)
    trie = users.trie.trie
    history: list[int] = []
    answer: list[int] = []
    dropped = 0
    for _ in range(10):
        if writer.draw.random() < 0.3:
            users.turn(writer.words(5, 20), writer.words(0, 5))
        prompt = [*history, *writer.words(1, 30)]
        session = users.turn(prompt, new := writer.words(0, 12))
        if dropped == 0:
            assert session.cached == session.matched == len(history)
        else:
            assert session.cached >= session.matched - (INTERVAL + BEFORE_END + len(answer) + dropped)
            assert family != "K" or session.cached == session.matched
        answer, dropped = new, writer.draw.choice([0, 0, writer.draw.randint(0, len(new))])
        kept = answer[: len(answer) - dropped] if writer.draw.random() < 0.5 else answer[dropped:]
        history = [*prompt, *kept]
    assert users.trie.trie is trie, "everything was freed on the way"


@everyone
@seeds
def test_cancelled_branches_cost_the_conversation_nothing(family: str, seed: int) -> None:  # scenario 65
    """Prefills diverge from a conversation above and below its checkpoints, and are cancelled anywhere."""
    users, writer = Conversation(family, "trie", policy=Every(INTERVAL, BEFORE_END)), Writer(seed)
    history: list[int] = []
    answer: list[int] = []
    for _ in range(6):
        prompt = [*history, *writer.words(1, 30)]
        session = users.turn(prompt, new := writer.words(1, 8))
        assert session.matched == len(history)
        assert session.cached >= session.matched - (INTERVAL + BEFORE_END + len(answer))
        history, answer = [*prompt, *new], new
        for _ in range(writer.draw.randint(1, 3)):
            shared = history[: writer.draw.randint(0, len(history))]
            branch = [*shared, *writer.words(1, 20)]
            session = users.cancelled_prefill(branch, after_chunks=writer.draw.randint(0, 4))
            assert session.matched == len(shared)
            assert session.cached >= session.matched - (INTERVAL + BEFORE_END + len(answer))
    # The last answer itself may have been joined with a cancelled prompt that went on from it.
    session = users.turn([*history, *writer.words(1, 5)])
    assert session.matched == len(history)
    assert session.cached >= session.matched - (INTERVAL + BEFORE_END + len(answer))


@everyone
@seeds
@pytest.mark.parametrize(
    "points",
    [At(), Every(INTERVAL), TurnCheckpoints(gap=2, first_distance=8, recent=2)],
    ids=["branch", "every", "real"],
)
def test_the_trie_finds_all_that_a_single_entry_finds(family: str, seed: int, points: Every) -> None:  # scenario 79
    single, trie = Conversation(family), Conversation(family, "trie", policy=points)
    for prompt, answer, event in _log(seed):
        sessions = []
        for users in (single, trie):
            match event:
                case "cancelled":
                    sessions.append(users.cancelled_prefill(prompt, after_chunks=1))
                case "broken":
                    sessions.append(users.failed_forward(prompt, after_chunks=1))
                case "unread":
                    sessions.append(users.turn(prompt, answer, before_record=_gone))
                case _:
                    sessions.append(users.turn(prompt, answer))
        if event in ("", "unread"):
            assert single.seen[-1] == trie.seen[-1]
        assert sessions[0].cached <= sessions[1].cached
        assert sessions[0].matched <= sessions[1].matched


@everyone
@seeds
@pytest.mark.parametrize("budget", [0, 20, 60, 150, 400])
def test_whatever_happens_the_budget_holds(family: str, seed: int, budget: int) -> None:
    users = Conversation(family, "trie", policy=Every(INTERVAL), budget=budget)
    for prompt, answer, event in _log(seed):
        match event:
            case "cancelled":
                users.cancelled_prefill(prompt, after_chunks=1)
            case "broken":
                users.failed_forward(prompt, after_chunks=1)
            case "unread":
                users.turn(prompt, answer, before_record=_gone)
            case _:
                users.turn(prompt, answer)


def _gone(k: int) -> None:
    if k:
        raise CancelledError


def _log(seed: int) -> Sequence[tuple[list[int], list[int], str]]:
    """Requests: prompt, answer, and what happens on the way."""
    writer = Writer(seed)
    histories: list[list[int]] = [[]]
    log = []
    for _ in range(25):
        history = writer.draw.choice(histories)
        kept = history[: writer.draw.randint(0, len(history))] if writer.draw.random() < 0.5 else history
        prompt = [*kept, *writer.words(0 if kept else 1, 15)]
        answer = writer.words(2, 6)
        event = writer.draw.choice(["", "", "", "", "cancelled", "broken", "unread"])
        log.append((prompt, answer, event))
        if not event:
            histories = [*histories, [*prompt, *answer]][-4:]
    return log
