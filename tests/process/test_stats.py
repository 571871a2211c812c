"""Statistics of a real process, in its endpoints, in `top` and in its log: the numbers match the requests, and no
prompt text is shown."""

import asyncio
import subprocess

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.stats import CachePicture, Stats
from scripts.tools.host.lib import F_SECOND, Client, Process, Request, StatusError
from tests.process.conftest import MAIN, RANDOM, RUNNER, SpawnModel, read_stats

PROMPT = "zebras and okapis met at the well of Souls in the rain, and none of them said a word about it"
OTHER = f"{PROMPT[:40]} but this time they did"
SECRETS = ("zebras", "okapis", "Souls")
LOOKS = ("/v1/stats", "/v1/cache", "/metrics")


async def stats(client: Client) -> Stats:
    """Returns fresh statistics; those of a moment ago may be served again."""
    before = None
    while True:
        found = await read_stats(client)
        if before is not None and found.uptime_s != before.uptime_s:
            return found
        before = before or found


async def cache_report(client: Client) -> CachePicture:
    return msgspec.json.decode((await client.send("GET", "/v1/cache")).body, type=CachePicture)


async def metrics(client: Client) -> dict[tuple[str, ...], float]:
    reply = await client.send("GET", "/metrics")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


async def test_the_numbers_match_the_requests(start: SpawnModel) -> None:
    process = start(RANDOM, generation=F_SECOND)
    async with Client.of(process) as client:
        first = (await client.complete(Request(PROMPT, {"num_predict": 5}))).final
        second = (await client.complete(Request(OTHER, {"num_predict": 7}))).final
        await client.complete(Request(PROMPT, {"num_predict": 100_000}), cancel_after=2)
        with pytest.raises(StatusError):
            await client.complete(Request(""))
        while (told := await stats(client)).requests.running:
            pass
        prompts = first.prompt_eval_count + second.prompt_eval_count + first.prompt_eval_count
        assert (told.model, told.architecture, told.cache_kind) == (RANDOM, "LlamaForCausalLM", "trie")
        requests = told.requests
        assert (requests.length + requests.done, requests.cancelled, requests.refused) == (2, 1, 1)
        assert told.tokens.prompt == prompts == told.tokens.cached + told.tokens.recomputed
        assert second.prompt_eval_cached_count is not None
        assert second.prompt_eval_cached_count > 20
        assert told.tokens.cached == second.prompt_eval_cached_count + first.prompt_eval_count - 1
        assert told.tokens.generated >= first.eval_count + second.eval_count + 2
        accepted = sum(told.drafts.accepted.values())
        assert told.slices.decode_rows + accepted >= told.tokens.generated
        assert told.slices.prefill_tokens == told.tokens.recomputed - 3, "the last of each belongs to its first step"
        assert told.memory.weights_bytes > 0
        assert told.memory.peak_bytes >= told.memory.used_bytes >= told.memory.weights_bytes
        drawn = await cache_report(client)
        assert len(drawn.nodes) == told.cache.nodes >= 3
        assert sum(node.paged_bytes for node in drawn.nodes) == told.cache.paged_bytes
        found = await metrics(client)
        assert found["mlx_runner_requests_total", "cancelled"] == 1
        assert found["mlx_runner_requests_total", "refused"] == 1
        assert found["mlx_runner_prompt_tokens_total", "cache"] == told.tokens.cached
        assert found["mlx_runner_time_to_first_token_seconds_count",] == 3
        assert found["mlx_runner_inter_token_latency_seconds_count",] == told.slices.decode_rows - 3


async def test_top_shows_a_real_runner(shared: Process, client: Client) -> None:
    await client.complete(Request("<again>", {"num_predict": 3}))
    words = [*RUNNER, "top", "--port", str(shared.port), "--once"]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    title, _, *rows = done.stdout.splitlines()
    assert title.startswith(f"{MAIN}  ")
    assert [row.split()[0] for row in rows[:3]] == ["requests", "prompts", "answers"]
    assert "first token after" in rows[2]


@pytest.mark.parametrize("inspected", [False, True])
async def test_prompts_are_shown_only_on_request(start: SpawnModel, inspected: bool) -> None:
    """Otherwise they appear neither in an endpoint nor in the log, at any level."""
    arguments = ["--log-level", "trace", *(["--inspect-text"] if inspected else [])]
    process = start(RANDOM, arguments, generation=F_SECOND)
    async with Client.of(process) as client:
        for prompt in (PROMPT, OTHER):
            await client.complete(Request(prompt, {"num_predict": 2}))
        for refused in (Request(PROMPT * 500), Request(PROMPT, {}, format={"type": "regex", "pattern": "zebras("})):
            with pytest.raises(StatusError):
                await client.complete(refused)
        bodies = [(await client.send("GET", path)).text for path in LOOKS]
        texts = [node.text for node in (await cache_report(client)).nodes]
    shown = [secret for secret in SECRETS if any(secret in body for body in bodies)]
    assert bool(shown) == inspected
    assert (texts[0] is not None) == inspected
    assert not [line for line in process.output.lines if any(secret in line for secret in SECRETS)]
    if inspected:
        assert PROMPT[:40] in texts
