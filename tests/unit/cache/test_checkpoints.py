"""Checkpoints: the plan for one prompt, the habits of conversations, and the tokens that are computed again, over the
real trie cache with layers of one number a token. Scenarios: docs/internals/cache.md, 8.
"""

import random
from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import pytest

from runner.cache.checkpoints import PRIOR, Checkpoint, CheckpointPolicy, Site, learned
from runner.cache.session import TrieSession
from runner.cache.sketch import LayerFacts
from runner.cache.trie_cache import TrieCache

from mlx_lm.models.cache import ArraysCache, KVCache  # isort: skip

START, END, THINK, NEWLINE, WORD = 0, 1, 2, 3, 50
TURN_TOKENS = frozenset({START, END, THINK})
POINTS = CheckpointPolicy(TURN_TOKENS)
GAP, BEFORE_END, NEAREST = 32, 4, 256
PICTURE = [-7] * 50


def chat(*lengths: int) -> tuple[list[int], list[int]]:
    """Messages of so many words, as a template sets them, and the opener of the answer. Returns the prompt and where
    its messages end: each next one begins there."""
    tokens: list[int] = []
    stops = []
    for length in lengths:
        tokens += [START, 4, NEWLINE, *[WORD] * length]
        stops.append(len(tokens))
        tokens += [END, NEWLINE]
    return [*tokens, START, 7, NEWLINE], stops


CLOSE, CLOSE_STOPS = chat(100, 1, 100)
LONG, LONG_STOPS = chat(5000)


def offsets(tokens: Sequence[int], cached: int = 0, branch: int = 0, most: int | None = None) -> list[int]:
    return [point.at for point in POINTS.plan(tokens, cached, branch, most)]


def test_a_prompt_is_left_where_its_last_messages_begin_and_after_the_system_prompt() -> None:
    tokens, stops = chat(500, *[60] * 10)
    assert offsets(tokens)[0] == stops[0]
    assert offsets(tokens)[-2:] == stops[-2:]


@pytest.mark.parametrize("tail", [[], [2, NEWLINE], [2, NEWLINE, NEWLINE, 8, NEWLINE]])
def test_a_prompt_is_left_before_whatever_opens_the_answer(tail: list[int]) -> None:
    """`<|im_end|>`, `<|im_start|>assistant`, `<think>`: asked again without reasoning, or with it dropped, it parts
    within them."""
    tokens, stops = chat(100, 100)
    assert offsets([*tokens, *tail])[-1] == stops[-1]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([WORD] * 200, [200 - BEFORE_END]),
        ([*[WORD] * 100, *PICTURE, WORD], [100]),
        ([*[WORD] * 100, *PICTURE, *[-8] * 50, WORD], [150]),
        ([*[WORD] * 100, *PICTURE, *[WORD] * 4], [150]),
        ([*[WORD] * 5, *[-7] * 3000, *[WORD] * 100], [3105 - BEFORE_END]),  # nor in the middle
        (PICTURE, []),
        (CLOSE, [CLOSE_STOPS[0], CLOSE_STOPS[2]]),  # the earliest of close ones stays
        # a document and a question about it, without a system prompt; or what a file holds before the cursor
        (LONG, [*(len(LONG) - distance for distance in (1536, 768, 384)), *LONG_STOPS]),
    ],
)
def test_a_prompt_is_left_at_these_offsets(tokens: list[int], expected: list[int]) -> None:
    assert offsets(tokens) == expected


def test_a_prompt_is_left_where_another_parts_from_it() -> None:
    """For as long as something branches off there."""
    assert Checkpoint(150, Site.BRANCH) in POINTS.plan([WORD] * 240, 0, 150, None)


def test_where_the_last_answer_ended_is_kept_for_nothing() -> None:
    """The layers stand there already, at the end of the answer; the next message begins there."""
    tokens, stops = chat(100, 100, 100)
    for cached in (stops[1], stops[1] + 1, stops[1] + 2):
        assert POINTS.plan(tokens, cached, cached, None)[0] == Checkpoint(cached, Site.START)
    assert Checkpoint(150, Site.START) not in POINTS.plan(tokens, 150, 150, None)


def test_checkpoints_ascend_and_lie_before_the_last_token() -> None:  # scenario 56
    choice = random.Random(5)
    for _ in range(300):
        end = choice.choice([1, 2, 5, 40, 700, 5000])
        tokens = choice.choices([START, END, *range(WORD, WORD + choice.choice([1, 10, 200]))], k=end)
        cached = choice.randrange(end)
        plan = POINTS.plan(tokens, cached, branch := choice.randrange(cached, end), most := choice.choice([None, 1, 3]))
        at = [point.at for point in plan]
        assert at == sorted(set(at))
        assert not at or max(cached, 1) <= at[0] <= at[-1] < end
        assert all(after - before >= GAP for before, after in zip([cached, *at], at, strict=False) if before != after)
        assert most is None or sum(each > cached for each in at) <= most
        assert most or not branch or any(branch - GAP < each <= branch for each in [cached, *at])


def test_a_limit_keeps_the_most_valuable_checkpoints() -> None:
    """The end and the last message coincide and count once; then the branch, the last message starts, the first."""
    tokens, stops = chat(2000, *[100] * 6)
    branch = stops[2] + 50
    ranked = [stops[-1], branch, stops[-2], stops[0]]
    for most in range(1, len(ranked) + 1):
        assert offsets(tokens, branch=branch, most=most) == sorted(ranked[:most])


def test_distances_grow_where_there_are_no_messages() -> None:
    end = 100_000
    at = offsets([WORD] * end)
    assert at[-1] == end - BEFORE_END
    distances = [end - each for each in at[-2::-1]]
    assert distances[0] == NEAREST * 3 // 2
    assert [later / earlier for earlier, later in pairwise(distances[:-1])] == [2, 2, 4, 4]
    assert len(at) == 7


def test_a_prompt_of_special_tokens_has_checkpoints_throughout() -> None:
    end = 20_000
    at = [0, *offsets([START] * end), end]
    assert all(after - before <= max(NEAREST * 3 // 2, 3 * (end - after)) for before, after in pairwise(at))
    assert len(at) <= end // NEAREST + 8


def test_an_edit_of_any_message_costs_little() -> None:
    tokens, stops = chat(2000, *[100] * 60)
    assert all(after - before <= NEAREST + 150 for before, after in pairwise([stops[0], *offsets(tokens)]))


@pytest.mark.parametrize("fits", [3000, 3010, 10_000])
def test_a_prompt_that_outgrows_the_budget_has_a_checkpoint_that_fits(fits: int) -> None:
    """At the start of a message; without one, at the last token that fits."""
    tokens = [*[WORD] * 3000, START, *[WORD] * 2000] if fits == 3010 else [WORD] * 5000
    points = POINTS.plan(tokens, 0, 0, 1, fits)
    assert [each.at for each in points] == [min(fits, 3000) if fits < 5000 else 5000 - BEFORE_END]


@pytest.mark.parametrize(
    ("cached", "branch", "site"), [(50, 60, Site.NEAR), (10, 110, Site.START), (110, 190, Site.FAR)]
)
def test_a_request_wanted_the_site_where_it_left_what_was_known(cached: int, branch: int, site: Site) -> None:
    assert POINTS.left([*[WORD] * 100, START, *[WORD] * 100], branch, cached, Site.NEAR) is site


@pytest.mark.parametrize("name", ["first_distance", "gap"])
def test_only_positive_distances(name: str) -> None:
    with pytest.raises(ValueError, match="positive"):
        CheckpointPolicy(frozenset(), **{name: 0})
    CheckpointPolicy(frozenset(), **{name: 1})


def test_habits_are_shares_and_follow_the_last_requests() -> None:
    habits = PRIOR
    for _ in range(30):
        habits = learned(habits, Site.NEAR)
        assert sum(habits) == pytest.approx(1)
    assert habits[Site.NEAR] > 0.9
    assert learned(habits, Site.END)[Site.END] > habits[Site.END]


def hybrid() -> TrieCache:
    return TrieCache(LayerFacts(lambda: [KVCache(), ArraysCache(1)], frozenset(range(2))), policy=POINTS)


def forward(session: TrieSession, count: int) -> None:
    with session.forward(count):
        sliced, state = session.layers
        assert isinstance(sliced, KVCache)
        assert isinstance(state, ArraysCache)
        sliced.update_and_fetch(mx.zeros((1, 1, count, 1)), mx.zeros((1, 1, count, 1)))
        state[0] = mx.zeros((1,))


def serve(cache: TrieCache, prompt: list[int], answer: Sequence[int]) -> int:
    """One request; without an answer its client leaves in the prefill. Returns the known tokens computed again."""
    session = cache.begin(prompt)
    assert isinstance(session, TrieSession)
    while count := session.next_forward(2048 if answer else 20):
        forward(session, count)
        if not answer:
            break
    for token in answer:
        forward(session, 1)
        session.record(token)
    session.close()
    return session.matched - session.cached


def test_ten_turns_are_cached_whole_or_but_for_the_opener_of_an_answer() -> None:  # scenarios 64 and 65
    cache, numbers = hybrid(), random.Random(1)

    def message(role: int, count: int) -> list[int]:
        return [START, role, NEWLINE, *numbers.choices(range(WORD, 4096), k=count), END, NEWLINE]

    said, kept = message(4, 600), True
    for turn in range(10):
        said += message(5, 60)
        prompt = [*said, START, 7, NEWLINE, THINK, NEWLINE]
        left = serve(cache, prompt, []) if turn % 4 == 1 else 0
        again = serve(cache, prompt, reasoned := numbers.choices(range(WORD, 4096), k=40))
        assert max(again, left) <= (0 if kept else GAP), turn
        kept = turn % 3 == 0
        if turn == 5:
            serve(cache, message(6, 300), [WORD])
        said = [*(prompt if kept else [*said, START, 7, NEWLINE]), *reasoned[20 * (not kept) :], END, NEWLINE]
