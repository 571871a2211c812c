"""Answers of the running process that begin with what the cache knows."""

from scripts.tools.host.lib import Client, Request
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.test_stats import stats


async def test_a_known_answer_is_taken_and_goes_on(start: SpawnModel) -> None:
    texts, taken = [], []
    for flags in ((), ("--draft-known",)):
        async with Client.of(start(RANDOM, [*flags, "--draft", "off"])) as client:
            requests = [Request("Once upon a time", {"num_predict": most}) for most in (40, 60)]
            texts.append([(await client.complete(each)).text for each in requests])
            drafts = (await stats(client)).drafts
            taken.append((drafts.drafted.get("known"), drafts.accepted.get("known")))
    assert texts[0] == texts[1]
    assert taken == [(None, None), (39, 39)]
