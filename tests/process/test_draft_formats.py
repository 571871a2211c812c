"""Answers of the running process that follow a format and are drafted."""

from scripts.tools.host.lib import Client, Completion, Request
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.test_stats import stats

TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 150}}, "required": ["text"]}
REQUEST = Request("Once upon a time", {"num_predict": 120}, format=TEXT)
TIMES = 4


async def test_answers_in_a_format_are_drafted_and_stay_the_same(start: SpawnModel) -> None:
    found: dict[str, list[tuple[str, int]]] = {}
    for draft in ("off", "auto"):
        async with Client.of(start(RANDOM, ["--draft", draft])) as client:
            answers: list[Completion] = [await client.complete(REQUEST) for _ in range(TIMES)]
            found[draft] = [(each.text, each.final.eval_count) for each in answers]
            counts = (await stats(client)).drafts
            assert bool(counts.rounds) == (draft == "auto")
            if draft == "auto":
                assert sum(counts.accepted.values()) > 60, "known from the first answer on"
    assert found["auto"] == found["off"]
    assert len(set(found["off"])) == 1
