"""The workload of the cache benchmark: what its requests have in common, and where they part."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import pytest

from scripts.tools.bench.agent_trace import (
    END,
    FIRST_WORD,
    NEWLINE,
    ROLES,
    START,
    THINK,
    TURN_TOKENS,
    AgentTrace,
    Ask,
    Workload,
)

MANY = Workload(seed=3, requests=400, system_tokens=50, user_tokens=20, tool_tokens=30, answer_tokens=8)
HAPPENINGS = {
    "open",
    "restart",
    "user",
    "tool",
    "edit",
    "elide",
    "regenerate",
    "retry",
    "cancelled",
    "dropped reasoning",
}


class Told(NamedTuple):
    """A request and its answer."""

    ask: Ask
    answer: list[int] | None


def words(ask: Ask) -> list[int]:
    """An answer that no other request has."""
    return [10_000 + 100 * ask.number + index % 100 for index in range(ask.answer_tokens)]


def play(workload: Workload, speak: Callable[[Ask], list[int]] = words) -> tuple[list[Told], Counter[str]]:
    trace, told = AgentTrace(workload), []
    while (ask := trace.next()) is not None:
        answer = None if ask.cancel is not None else speak(ask)
        trace.answer(answer)
        told.append(Told(ask, answer))
    return told, trace.counts


def waiting_trace() -> AgentTrace:
    """A trace whose first request waits for its answer."""
    trace = AgentTrace(Workload())
    trace.next()
    return trace


def steps(told: Sequence[Told], operation: str) -> Iterator[tuple[Told, Told]]:
    """The requests of an operation, each after the request before it of the same agent."""
    before: dict[int, Told] = {}
    for one in told:
        if one.ask.operation == operation:
            yield before[one.ask.agent], one
        before[one.ask.agent] = one


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def messages(prompt: Sequence[int]) -> list[list[int]]:
    """The messages of a prompt, the opener of the assistant last."""
    starts = [index for index, token in enumerate(prompt) if token == START]
    return [list(prompt[a:b]) for a, b in zip(starts, [*starts[1:], len(prompt)], strict=True)]


@pytest.fixture(scope="module")
def told() -> list[Told]:
    return play(MANY)[0]


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    first, again, other = (play(Workload(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first[0][0].ask.prompt != other[0][0].ask.prompt


def test_everything_happens_by_default() -> None:
    told, counts = play(Workload())
    assert set(counts) == HAPPENINGS
    assert min(counts.values()) >= 1
    assert {one.ask.agent for one in told} == set(range(6))
    operations = Counter(one.ask.operation for one in told)
    assert operations == {name: counts[name] for name in HAPPENINGS - {"cancelled", "dropped reasoning"}}
    assert counts["cancelled"] == sum(one.answer is None for one in told)


def test_agents_share_the_system_prompts(told: list[Told]) -> None:
    prompts = {one.ask.agent: tuple(messages(one.ask.prompt)[0]) for one in told}
    assert len(prompts) == MANY.agents
    assert len(set(prompts.values())) == MANY.systems
    assert {len(prompt) for prompt in prompts.values()} == {MANY.system_tokens + 5}


def test_every_message_has_a_head_and_an_end(told: list[Told]) -> None:
    for one in told:
        *whole, opener = messages(one.ask.prompt)
        assert [message[-2:] for message in whole] == [[END, NEWLINE]] * len(whole)
        assert {message[1] for message in whole} <= set(ROLES.values())
        assert opener in ([START, ROLES["assistant"], NEWLINE], [START, ROLES["assistant"], NEWLINE, THINK, NEWLINE])
        assert all(token >= FIRST_WORD for message in whole if THINK not in message for token in message[3:-2])


def test_a_tool_result_extends_what_was_computed(told: list[Told]) -> None:
    pairs = list(steps(told, "tool"))
    assert len(pairs) > 50
    for before, after in pairs:
        assert before.answer is not None
        shown = [*before.ask.prompt, *before.answer, END, NEWLINE]
        assert after.ask.prompt[: len(shown)] == shown


def test_a_message_of_the_user_drops_the_reasoning_before_it(told: list[Told]) -> None:
    dropped = 0
    for before, after in steps(told, "user"):
        assert before.answer is not None
        assert THINK not in after.ask.prompt[:-5]
        *_, answer, _, _ = messages(after.ask.prompt)
        spoken = answer[3:-2]
        assert spoken == before.answer[-len(spoken) :]
        if THINK in before.ask.prompt:
            dropped += 1
            assert len(spoken) < len(before.answer)
            assert after.ask.prompt[common(before.ask.prompt, after.ask.prompt) - 1] == NEWLINE
    assert dropped > 10
    assert dropped <= play(MANY)[1]["dropped reasoning"]


@pytest.mark.parametrize("operation", ["regenerate", "retry"])
def test_the_same_prompt_comes_again_with_another_seed(told: list[Told], operation: str) -> None:
    pairs = list(steps(told, operation))
    assert len(pairs) > 5
    for before, after in pairs:
        assert after.ask.prompt == before.ask.prompt
        assert after.ask.seed != before.ask.seed
        assert (before.answer is None) == (operation == "retry")


def test_an_edit_changes_one_past_message_anywhere_and_drops_what_follows(told: list[Told]) -> None:
    places, ages, partings = [], [], []
    for before, after in steps(told, "edit"):
        old, new = messages(before.ask.prompt), messages(after.ask.prompt)
        edited, original = new[-2], old[len(new) - 2]
        assert edited[1] in (ROLES["user"], ROLES["tool"])
        assert edited != original
        assert edited[:3] == original[:3]
        places.append((common(edited, original) - 3) / max(1, len(original) - 5))
        ages.append(sum(message[1] in (ROLES["user"], ROLES["tool"]) for message in old[len(new) - 1 :]))
        partings.append(before.ask.prompt[common(before.ask.prompt, after.ask.prompt)])
    assert len(places) > 30
    assert 0.35 < median(places) < 0.65
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert 0 < sum(age == 0 for age in ages) < len(ages)
    assert max(ages) >= 4
    assert sum(token in TURN_TOKENS for token in partings) < len(partings) / 4


def test_an_elided_tool_result_is_shorter_and_all_that_follows_stays(told: list[Told]) -> None:
    pairs = list(steps(told, "elide"))
    assert len(pairs) > 10
    for before, after in pairs:
        old, new = messages(before.ask.prompt)[:-1], messages(after.ask.prompt)[: len(messages(before.ask.prompt)) - 1]
        changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b and THINK not in a]
        assert [a[1] for a, _ in changed] == [ROLES["tool"]]
        ((original, elided),) = changed
        assert elided[:-5] == original[: len(elided) - 5]
        assert len(elided) <= len(original) + 3
        assert elided != new[-1]


def test_cancelled_requests_are_tried_again_or_changed(told: list[Told]) -> None:
    cancelled: set[int] = set()
    for one in told:
        if one.ask.agent in cancelled:
            assert one.ask.operation in ("retry", "edit")
        (cancelled.add if one.answer is None else cancelled.discard)(one.ask.agent)
        assert one.ask.cancel is None or 0 < one.ask.cancel < 1
    shares = [one.ask.cancel for one in told if one.ask.cancel is not None]
    assert 0.03 * len(told) < len(shares) < 0.15 * len(told)


def test_a_full_context_starts_a_new_conversation() -> None:
    told, counts = play(Workload(requests=200, context_tokens=1200))
    assert max(len(one.ask.prompt) for one in told) < 1200 + 8 * (120 + 2 * 16)
    assert counts["restart"] > play(Workload(requests=200, context_tokens=100_000))[1]["restart"]


@pytest.mark.parametrize("wrong", [{"agents": 0}, {"requests": 0}, {"systems": 0}, {"scale": 0.0}, {"vocabulary": 16}])
def test_a_workload_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^a (workload|vocabulary) has"):
        Workload(**wrong)
