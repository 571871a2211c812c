"""The tokens that the trie knows as the most probable ones behind their prefix, and sessions that begin with them."""

import random
from collections.abc import Collection, Sequence

import pytest

from runner.cache.cached_answer import CachedAnswers, known_choices, mark
from runner.cache.interface import Greedy
from runner.cache.node import keys, spelled
from runner.cache.session import TrieSession
from runner.cache.trie import PrefixTrie
from tests.lib.story import BranchOnly, Conversation

PROMPT = [1, 2, 3, 4, 5]
ANSWER = [20, 21, 22, 23]


# --- marks


def known_of(marked: Collection[tuple[int, ...]], tokens: Sequence[int], most: int) -> list[int]:
    """What is known behind these tokens if these prefixes end with known choices."""
    found: list[int] = []
    while len(found) < most:
        said = (*tokens, *found)
        coming = [each[-1] for each in marked if each[:-1] == said]
        if len(coming) != 1:
            break
        found += coming
    return found


@pytest.mark.parametrize("seed", range(8))
def test_marks_stay_with_their_tokens(seed: int) -> None:
    """Whatever is added, split, merged and removed, in any order."""
    numbers, trie, marked = random.Random(seed), PrefixTrie(), set[tuple[int, ...]]()
    root = trie.root()
    for _ in range(150):
        nodes = list(trie.nodes())
        node = numbers.choice(nodes) if nodes else None
        match numbers.choice(("add", "mark", "split", "merge", "remove")):
            case "add":
                trie.advance(root, keys(numbers.choices((1, 2), (8, 1), k=numbers.randint(1, 12))))
            case "mark" if node:
                said = tuple(spelled(node.path()))
                start = numbers.randrange(node.end)
                mark(node, start)
                marked |= {said[:end] for end in range(start + 1, node.end + 1)}
            case "split" if node and len(node.tokens) > 1:
                trie.split(node, numbers.randrange(1, len(node.tokens)))
            case "merge" if node and node.only_child():
                trie.merge(node)
            case "remove" if node and not node.children and len(nodes) > 4:
                gone = [node]
                while (parent := gone[-1].parent) and parent.parent and parent.only_child():
                    gone.append(parent)  # it holds nothing, and leads nowhere
                said = tuple(spelled(node.path()))
                marked -= {said[:end] for end in range(gone[-1].start + 1, node.end + 1)}
                trie.remove(node)
        for each in trie.nodes():
            said = tuple(spelled(each.path()))
            tokens, most = said[: numbers.randint(0, len(said))], numbers.randint(0, 9)
            assert known_choices(trie, root, tokens, most) == known_of(marked, tokens, most)


def test_tokens_that_are_not_in_the_trie_have_no_known_continuation() -> None:
    trie = PrefixTrie()
    mark(trie.advance(trie.root(), keys([1, 2, 3]))[-1], 0)
    assert known_choices(trie, trie.root(), [1], 9) == [2, 3]
    assert known_choices(trie, trie.root(), [1, 3], 9) == []
    assert known_choices(trie, trie.root(), [1, 2, 3, 4], 9) == []
    assert known_choices(trie, trie.root(), [1], -1) == []


# --- sessions


def greedy_users(family: str) -> tuple[Conversation, CachedAnswers]:
    users = Conversation(family, "trie")
    users.cache = cache = CachedAnswers(users.make_layers, None, BranchOnly())
    return users, cache


def answer(users: Conversation, session: TrieSession, tokens: Sequence[int] = ANSWER, *, unread: bool = False) -> None:
    """Computes and records an answer; if `unread`, its last token is computed and never recorded."""
    prompt = list(session.recorded)
    users.prefill(session, prompt)
    for k, token in enumerate(tokens):
        said = [*prompt, *tokens[:k]]
        users.forward(session, said[-1:], said)
        session.record(token)
    if unread:
        session.recorded.pop()
    session.close()
    users.check_closed()


def known(users: Conversation, cache: CachedAnswers, most: int = 9, ends: Sequence[int] = (), salt: str = "") -> object:
    """What a session would begin with, which is closed at once."""
    session = cache.begin(PROMPT, salt, greedy=Greedy(most, ends))
    found = [*session.known]
    session.close()
    users.check_closed()
    return found


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_a_greedy_answer_is_known_as_far_as_the_layers_have_seen_it(family: str) -> None:
    users, cache = greedy_users(family)
    answer(users, cache.begin(PROMPT, greedy=Greedy(0, ())))
    assert known(users, cache) == ANSWER[:-1]
    assert known(users, cache, most=2) == ANSWER[:2]
    assert known(users, cache, most=0) == []
    assert known(users, cache, salt="another") == []
    assert known(users, cache, ends=ANSWER[1:2]) == ANSWER[:1]


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_other_answers_are_not_known(family: str) -> None:
    users, cache = greedy_users(family)
    session = cache.begin(PROMPT)
    assert isinstance(session, TrieSession)
    answer(users, session)
    assert known(users, cache) == []


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_prompts_are_not_known(family: str) -> None:
    users, cache = greedy_users(family)
    answer(users, cache.begin(PROMPT, greedy=Greedy(0, ())))
    session = cache.begin(PROMPT[:2], greedy=Greedy(9, ()))
    assert session.known == []
    session.close()


def test_layers_that_are_ahead_return_to_what_was_taken() -> None:
    users, cache = greedy_users("K")
    answer(users, cache.begin(PROMPT, greedy=Greedy(0, ())))
    session = cache.begin(PROMPT, greedy=Greedy(9, ()))
    assert (session.cached, session.position) == (len(PROMPT) - 1, len(PROMPT) + 2)
    session.record(session.known.pop(0))
    session.end_known()
    assert (session.known, session.position) == ([], len(PROMPT))
    said = [*PROMPT, ANSWER[0]]
    users.forward(session, said[-1:], said)
    session.record(ANSWER[1])
    session.close()
    users.check_closed()
    assert users.record == said
    assert users.shape == "0-6 [6-8]"
    assert known(users, cache) == ANSWER[:-1]
