"""The arithmetic of `scripts/bench real` on figures made by hand, and its conversations with a server that is none."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scripts.tools.bench.real import CASES, USERS, Conversations, Heard, Turn, report, speed_of
from scripts.tools.bench.servers import MLX_LM, OURS, Lines, MismeasuredError


def turn(factor: float) -> Turn:
    return Turn(dict.fromkeys(CASES, 100 * factor), {users: 10 * users / factor for users in USERS})


FOUND = {OURS: [turn(1), turn(1), turn(8)], MLX_LM: [turn(2), turn(4), turn(4)]}
REPORT = report(
    3,
    {OURS: [0.5, 0.7, 0.9], MLX_LM: [1.0, 1.0, 1.0]},
    FOUND,
    {OURS: 600_000_000, MLX_LM: 300_000_000},
)


class Echo:
    """A server that answers every prompt with as many words as it may, and counts the prompts that it has seen."""

    cached: int | None = None

    def __init__(self, pieces: int = 10**6) -> None:
        self.pieces = pieces
        self.prompts: list[str] = []

    @asynccontextmanager
    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Lines]:
        self.prompts.append(prompt)

        async def lines() -> Lines:
            for _ in range(min(tokens, self.pieces)):
                yield "word "

        yield lines()

    async def close(self) -> None: ...


def count(text: str) -> int:
    return len(text.split())


def test_targets_are_ratios_taken_round_by_round() -> None:
    targets = REPORT.targets
    assert [target.value for target in targets] == pytest.approx([0.5] * len(CASES) + [2.0] * len(USERS))
    assert all(target.met for target in targets)
    assert report(3, {OURS: [0.5]}, {OURS: FOUND[OURS]}, {OURS: 1}).targets == []


def test_the_table_has_a_line_for_each_contender() -> None:
    lines = [line.split() for line in REPORT.table().splitlines()]
    assert [OURS, "700", *["100"] * 4, "10.0", "40.0", "80.0", "600"] in lines
    assert [MLX_LM, "1,000", *["400"] * 4, "2.5", "10.0", "20.0", "300"] in lines


def test_json_has_every_round() -> None:
    data = json.loads(json.dumps(REPORT.figures))
    assert [each["first_ms"]["cold"] for each in data["rounds"][OURS]] == [100, 100, 800]


def test_answers_at_once_count_from_the_first_text_of_all_to_the_last() -> None:
    assert speed_of([Heard("", 0.1, 1.0, 2.0, 30), Heard("", 0.1, 1.5, 3.0, 10)]) == pytest.approx(20)


async def test_a_turn_goes_on_where_the_last_answer_ended() -> None:
    echo = Echo()
    conversations = Conversations(1, count)
    found = await conversations.turn(echo)
    assert set(found.first_ms) == set(CASES)
    assert set(found.tokens_per_s) == set(USERS)
    cold, again, append, *others = echo.prompts[: -sum(USERS)]
    assert cold == again
    assert append.startswith(cold + "word ")
    first, second, *switches = others
    assert all(
        prompt.startswith(previous) for prompt, previous in zip(switches, [first, second, *switches], strict=False)
    )
    stories = echo.prompts[-sum(USERS) :]
    assert len(set(stories)) == len(stories)


def test_passages_are_as_long_as_wanted_and_never_the_same() -> None:
    conversations = Conversations(1, count)
    passages = [conversations.text(50) for _ in range(20)]
    assert {count(passage) for passage in passages} == {50}
    assert len(set(passages)) == 20
    assert Conversations(1, count).text(50) == passages[0]


async def test_an_answer_without_text_is_no_measurement() -> None:
    with pytest.raises(MismeasuredError):
        await Conversations(1, count).hear(Echo(0), "a", 4)
