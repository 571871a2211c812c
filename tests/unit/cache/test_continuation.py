"""The tokens that followed in other conversations, as the trie names them for drafts."""

import random

import pytest

from runner.cache.node import keys
from runner.cache.trie import PrefixTrie
from tests.lib.story import Conversation

ANSWER = [20, 21, 22, 23]
PROMPT = [1, 2, 3, 4, 5]


def following(users: Conversation, prompt: list[int], answered: list[int], most: int = 9) -> list[int]:
    """What a session of this prompt would be drafted with, after a part of its answer."""
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
    users.serve(PROMPT, ANSWER)
    seen = ANSWER[:-1]  # by the layers; of the last token nothing is known but its name
    assert following(users, PROMPT, []) == seen
    assert following(users, PROMPT, ANSWER[:2]) == seen[2:]
    assert following(users, PROMPT, [], most=2) == ANSWER[:2]
    assert following(users, PROMPT, ANSWER) == []


def test_pictures_end_a_continuation() -> None:
    users = Conversation("K", "trie")
    users.serve([*PROMPT, 20, -3, -3, 30], [31])
    assert following(users, PROMPT, []) == [20]


def test_a_fork_offers_the_way_that_was_used_last() -> None:
    trie = PrefixTrie()
    first, second = trie.extend(trie.root(), keys([1, 2, 3, 4])), trie.extend(trie.root(), keys([1, 2, 7, 8]))
    for used, expected in ((first, [3, 4]), (second, [7, 8])):
        trie.touch(used)
        assert trie.continuation(trie.root(), keys([1, 2]), 9).tolist() == expected


def test_any_continuation_is_a_path_of_the_trie() -> None:
    numbers, trie, texts = random.Random(5), PrefixTrie(), []
    for _ in range(200):
        text = [numbers.randrange(3) for _ in range(numbers.randint(1, 12))]
        texts.append(text)
        trie.touch(trie.extend(trie.root(), keys(text)))
        begun = [numbers.randrange(3) for _ in range(numbers.randint(0, 6))]
        found = trie.continuation(trie.root(), keys(begun), numbers.randint(1, 5)).tolist()
        whole = begun + found
        longer = [text for text in texts if text[: len(begun)] == begun and len(text) > len(begun)]
        assert bool(found) == bool(longer)
        assert any(text[: len(whole)] == whole for text in texts) or not found
