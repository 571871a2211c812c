"""Statistics of a real process: the numbers match the requests, and no prompt text is shown."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.stats import CachePicture, Stats
from scripts.tools.host.lib import F_SECOND, Client, Request, StatusError, free_port
from tests import ROOT
from tests.process.conftest import RANDOM, SpawnModel, read_stats
from tests.unit.test_terminal import Screen

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
        await client.complete(Request(PROMPT, {"num_predict": 400}), cancel_after=2)
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


async def test_counters_never_go_back_while_they_are_scraped(client: Client) -> None:
    scrapes = []
    for number in range(5):
        await client.complete(Request(f"{number} and more", {"num_predict": 3}))
        scrapes.append(await metrics(client))
    for before, after in pairwise(scrapes):
        counters = [name for name in before if re.search(r"_(total|count|bucket|sum)$", name[0])]
        assert len(counters) > 50
        assert all(after[name] >= before[name] for name in counters)


async def test_events_flow_while_an_answer_is_written(start: SpawnModel) -> None:
    process = start(RANDOM)
    async with Client.of(process) as client, Client.of(process) as page:
        async with client.stream(Request(PROMPT, {"num_predict": 100_000})) as stream:
            async for _ in stream:
                break
            kinds, generated = await watch(page, lambda count, _: count >= 3)
            assert kinds["stats"] >= 3
            assert generated == sorted(generated)
        await watch(page, lambda _, running: not running)


async def watch(page: Client, enough: Callable[[int, bool], bool]) -> tuple[dict[str, int], list[int]]:
    """Returns the kinds of events and the number of tokens generated at each."""
    kinds: dict[str, int] = {}
    generated: list[int] = []
    async with page._session.get("/v1/events") as response:
        while True:
            frame = (await response.content.readuntil(b"\n\n")).decode()
            kind, data = re.match(r"event: (\w+)\ndata: (.*)\n\n", frame).groups()  # type: ignore[union-attr]  # or it raises
            kinds[kind] = kinds.get(kind, 0) + 1
            if kind == "stats":
                told = msgspec.json.decode(data, type=Stats)
                generated.append(told.tokens.generated)
                if enough(kinds["stats"], bool(told.running)):
                    return kinds, generated


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


@pytest.mark.parametrize("path", [*LOOKS, "/v1/events"])
async def test_no_foreign_web_page_reads_them(client: Client, path: str) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        reply = await client.send("GET", path, headers=headers)
        assert reply.status == 403
        assert "mlx_runner" not in reply.text


# --- started from a terminal


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    screen.size(200)
    yield screen
    screen.close()


SLOW = """
import runner.engine.observe.progress as prefills
prefills._EVERY_S = 0.0
import runpy
runpy.run_module('runner', run_name='__main__')
"""
"""Starts a runner that reports the progress of a prompt after every slice."""


class ByHand:
    """A runner whose stderr is a terminal."""

    def __init__(self, screen: Screen, models_dir: Path, *words: str) -> None:
        self.port = free_port()
        self._screen = screen
        self._popen = subprocess.Popen(
            [sys.executable, "-c", SLOW, *words, "--model", RANDOM, "--port", str(self.port), "--prefill-chunk", "8"],
            env={**os.environ, "OLLAMA_MODELS": str(models_dir)},
            stderr=screen.inside,
            cwd=ROOT,
        )

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        deadline = time.monotonic() + 60
        while not seen(self._screen.lines):
            assert time.monotonic() < deadline, self._screen.lines
            select.select([self._screen.outside], [], [], 1.0)
        return self._screen.lines

    def close(self) -> None:
        self._popen.send_signal(signal.SIGKILL)
        self._popen.wait()


def is_log(line: str) -> bool:
    return bool(re.fullmatch(r"time=\S+ level=\w+ source=\S+ msg=.*", line))


@pytest.mark.parametrize("hosted", [False, True])
async def test_a_long_prompt_shows_a_progress_bar_only_on_a_terminal(
    hosted: bool, screen: Screen, models_dir: Path
) -> None:
    process = ByHand(screen, models_dir, *(["runner", "--mlx-engine", "--watch-parent=off"] if hosted else []))
    try:
        process.until(lambda lines: any("msg=listening" in line for line in lines))
        async with Client(process.port) as client:
            await client.complete(Request(PROMPT, {"num_predict": 2}))
        lines = process.until(lambda lines: any("msg=completion" in line for line in lines) and lines[-1] == "")
        assert all(is_log(line) for line in lines[:-1]), "no line has a piece of the bar in it"
        assert (b"[####" in screen.written) == (not hosted)
        assert any("msg=prefill " in line for line in lines) == hosted
    finally:
        process.close()


async def test_the_log_line_of_a_request_explains_its_duration(start: SpawnModel) -> None:
    process = start(RANDOM)
    async with Client.of(process) as client:
        await client.complete(Request(PROMPT, {"num_predict": 4}))
        while not (lines := [line for line in process.output.lines if "msg=completion" in line]):
            await client.status()
    (line,) = lines
    fields = dict(re.findall(r"(\w+)=(\S+)", line))
    assert fields.keys() >= {
        *("request", "outcome", "total", "matched", "cached", "left", "miss", "evicted_bytes", "generated", "forced"),
        *("waited_ms", "ttft_ms", "prefill_tokens_per_s", "tokens_per_s"),
    }
    assert (fields["miss"], fields["cached"], fields["evicted_bytes"]) == ("empty", "0", "0")
