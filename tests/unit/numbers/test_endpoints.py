"""The runner's numbers over HTTP, from those that its engine published last."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import cast

import msgspec
import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from protocol.stats import (
    CacheCounts,
    CachePicture,
    Counter,
    Info,
    Metric,
    Rank,
    RankCounts,
    RequestCounts,
    RunningRequest,
    Stats,
    TokenCounts,
)
from runner.cache.layer_interface import Miss
from runner.engine.engine import Engine
from runner.engine.events import Refused
from runner.engine.parts import Parts
from runner.numbers.endpoints import CACHE_S, HEARTBEAT_S, STATS_S, EventFeed, StatsEndpoints
from runner.numbers.journal import Distributions, EngineStats
from runner.numbers.metrics import METRICS, annotations, scrape
from runner.numbers.stats_cache import StatsCache
from runner.tokenizer import open_tokenizer
from scripts.tools.docs.generate import DOCS
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.lib.page_stand_in import STATS, node
from tests.lib.tiny_engine import Clock
from tests.unit.numbers.conftest import Answer, Counted
from tests.unit.server.script import Client

PATHS = ("/v1/stats", "/v1/cache", "/v1/events", "/metrics")
NODE = node(7, None, 0, 40, locks=1)
BUSY = msgspec.structs.replace(
    STATS, running=[RunningRequest(number=3, phase="decode", prompt=40, generated=2, max_tokens=9)]
)


class Slow(Counted):
    """Answers when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = asyncio.Event()

    async def ask(self, question: Callable[[Parts], Answer]) -> Answer:
        await self.answered.wait()
        return await super().ask(question)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def cache_of(engine: Counted, clock: Clock, *, patience_s: float = 60.0, fresh_s: float = 0.2) -> StatsCache:
    return StatsCache(cast("Engine", engine), patience_s=patience_s, fresh_s=fresh_s, clock=clock)


async def test_during_a_long_slice_the_last_numbers_are_repeated(clock: Clock) -> None:
    engine = Slow()
    cache = cache_of(engine, clock, patience_s=0.0)
    asking = asyncio.create_task(cache.published())
    await asyncio.sleep(0)
    assert not asking.done(), "there are none yet"
    engine.answered.set()
    assert (await asking).stats == STATS
    engine.answered.clear()
    engine.stats, clock.now = BUSY, 5.0
    assert (await cache.published()).stats == STATS
    engine.answered.set()
    while (await cache.published()).stats == STATS:
        await asyncio.sleep(0)
    assert engine.asked == ["stats"] * 2, "the question that was on its way was not asked again"


async def test_concurrent_queries_share_one_answer_even_if_one_is_cancelled(clock: Clock) -> None:
    engine = Slow()
    cache = cache_of(engine, clock)
    impatient, *patient = [asyncio.create_task(cache.published()) for _ in range(5)]
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    engine.answered.set()
    assert [(await each).stats for each in patient] == [STATS] * 4
    await cache.published()
    assert engine.asked == ["stats"]
    clock.now = 0.2
    await cache.published()
    assert engine.asked == ["stats"] * 2


async def test_the_cache_is_drawn_once_for_each_change(engine: Counted, clock: Clock) -> None:
    cache = cache_of(engine, clock)
    drawn = await asyncio.gather(*(cache.cache_picture() for _ in range(5)))
    assert drawn == [CachePicture(generation=1, kind="trie")] * 5
    engine.nodes, engine.mark = [NODE], 1
    assert (await cache.cache_picture()).generation == 1, "as of the numbers that were published last"
    clock.now = 0.2
    assert await cache.cache_picture() == CachePicture(generation=2, kind="trie", nodes=[NODE])
    clock.now = 0.4
    assert (await cache.cache_picture()).generation == 2
    assert engine.asked == ["stats", "cache"] * 2 + ["stats"]


async def test_a_changed_cache_report_is_sent_at_most_once_a_second(engine: Counted, clock: Clock) -> None:
    feed = EventFeed(cache_of(engine, clock, fresh_s=0.0), clock)
    told = []
    for clock.now in (0.0, *(step * STATS_S for step in range(1, 9)), 9.0):
        told.append(re.findall(r"^(?:event: (\w+)$|: )", (await feed.new_events()).decode(), re.MULTILINE))
        engine.mark += clock.now < 8 * STATS_S
    assert told == [["stats", "cache"], *[[], ["cache"]] * 4, []]
    assert engine.asked.count("cache") == 5, "the engine draws no picture that nobody gets"
    assert CACHE_S == 1.0


async def test_news_are_events_of_one_line_of_json(engine: Counted, clock: Clock) -> None:
    engine.nodes = [msgspec.structs.replace(NODE, text="two\nlines\r\n\u2028 of it")]
    frames = await EventFeed(cache_of(engine, clock), clock).new_events()
    assert frames.endswith(b"\n\n")
    stats, cache = frames.decode().removesuffix("\n\n").split("\n\n")
    assert [frame.split("\n")[0] for frame in (stats, cache)] == ["event: stats", "event: cache"]
    assert msgspec.json.decode(stats.split("\n")[1].removeprefix("data: "), type=Stats) == STATS
    picture = msgspec.json.decode(cache.split("\n")[1].removeprefix("data: "), type=CachePicture)
    assert picture.nodes == engine.nodes


@pytest.mark.parametrize("path", PATHS)
async def test_no_foreign_web_page_gets_the_numbers(client: Client, engine: Counted, path: str) -> None:
    response = await client.get(path, headers={"Origin": "https://evil.example"})
    assert response.status == 403
    assert not engine.asked


async def test_the_endpoints_are_read_only_and_a_head_has_an_end(client: Client) -> None:
    assert {(await client.post(path)).status for path in PATHS} == {405}
    assert [(await client.head(path)).status for path in PATHS] == [200, 200, 405, 200]


@pytest.mark.parametrize(
    ("path", "body"), [("/completion", b""), ("/completion", b'{"Prompt":""}'), ("/v1/score", b"")]
)
async def test_a_wrong_body_is_a_refused_request(client: Client, engine: Counted, path: str, body: bytes) -> None:
    await client.get("/v1/stats")
    assert (await client.post(path, data=body)).status == 400
    assert (await (await client.get("/v1/stats")).json())["requests"]["refused"] == 1


async def test_refusals_of_the_engine_are_counted_by_it(client: Client, engine: Counted) -> None:
    posted = asyncio.create_task(client.post("/completion", data=b'{"Prompt":"xy"}'))
    engine.tell(await engine.next(), Refused("too large"))
    assert (await posted).status == 400
    assert (await (await client.get("/v1/stats")).json())["requests"]["refused"] == 0


@pytest.mark.parametrize(("path", "counted"), [("/completion", 1), ("/v1/tokenize", 0)])
async def test_a_text_over_which_the_tokenizer_panics_is_a_failed_request(
    client: Client, engine: Counted, path: str, counted: int, caplog: pytest.LogCaptureFixture, capfd: object
) -> None:
    del capfd  # the library tells of its panics itself
    vocabulary = byte_level(ALL_BYTES) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    engine.tokenizer = open_tokenizer({"tokenizer.json": json.dumps(vocabulary).encode()}.get)
    await client.get("/v1/stats")
    response = await client.post(path, data=b'{"Prompt":"xy"}')
    assert response.status == 500
    assert (await (await client.get("/v1/stats")).json())["requests"]["failed"] == counted
    assert "chunk size must be non-zero" in caplog.text


class Beat:
    """In place of a sleep: the next poll comes when a test says so."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = asyncio.Event()
        self.resting = asyncio.Event()
        self.left = asyncio.Event()
        """Whoever rested will poll no more."""

    async def sleep(self, seconds: float) -> None:
        self.resting.set()
        try:
            await self._next.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        self._next.clear()
        self._clock.now += seconds

    async def go_on(self) -> None:
        """Until it rests again."""
        self.resting.clear()
        self._next.set()
        await self.resting.wait()


@pytest.fixture
async def beat(clock: Clock) -> Beat:
    return Beat(clock)


@pytest.fixture
async def watched(
    engine: Counted, helper: Executor, clock: Clock, beat: Beat, aiohttp_client: Callable[..., Awaitable[Client]]
) -> Client:
    app = web.Application()
    app.add_routes(StatsEndpoints(cast("Engine", engine), helper, clock=clock, sleep=beat.sleep).routes)
    return await aiohttp_client(TestServer(app), server_kwargs={"handler_cancellation": True})


async def read_event(response: ClientResponse) -> str:
    """Its first line."""
    async with asyncio.timeout(5):
        frame = await response.content.readuntil(b"\n\n")
    return frame.decode().split("\n")[0]


async def test_a_page_receives_changes_and_then_heartbeats(watched: Client, engine: Counted, beat: Beat) -> None:
    response = await watched.get("/v1/events")
    assert (response.status, response.content_type) == (200, "text/event-stream")
    assert response.headers["Cache-Control"] == "no-store"
    assert [await read_event(response) for _ in range(2)] == ["event: stats", "event: cache"]
    await beat.resting.wait()
    engine.stats = BUSY
    await beat.go_on()
    assert await read_event(response) == "event: stats"
    for _ in range(int(HEARTBEAT_S / STATS_S)):
        await beat.go_on()
    assert await read_event(response) == ": nothing new"
    response.close()


async def test_the_engine_is_not_queried_after_the_page_closes(watched: Client, engine: Counted, beat: Beat) -> None:
    response = await watched.get("/v1/events")
    await read_event(response)
    await beat.resting.wait()
    response.close()
    async with asyncio.timeout(5):
        await beat.left.wait()
    assert engine.asked == ["stats", "cache"]


def families(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Every sample by its name and the values of its labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_each_form_of_annotation_becomes_samples(client: Client, engine: Counted) -> None:
    """A rate over a counter that appears only with its first event misses that event."""
    engine.stats = msgspec.structs.replace(
        STATS,
        requests=RequestCounts(done=4),
        tokens=TokenCounts(generated=30, forced=12),
        cache=CacheCounts(budget_bytes=1000, misses={"empty": 2}),
        ranks=RankCounts(latency_us=250, members=[Rank(rank=3, name="3", memory_bytes=70)]),
    )
    response = await client.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    found = families(await response.text())
    ended = found["mlx_runner_requests_total"]
    assert ended == {("done",): 4, ("length",): 0, ("cancelled",): 0, ("failed",): 0, ("refused",): 0}
    assert found["mlx_runner_generated_tokens_total"] == {("sampled",): 18, ("forced",): 12}
    assert found["mlx_runner_cache_budget_bytes"] == {(): 1000}
    misses = {(str(reason),): 2 if reason == "empty" else 0 for reason in Miss if reason}
    assert found["mlx_runner_cache_misses_total"] == misses
    assert found["mlx_runner_ranks"] == {(): 1}
    assert found["mlx_runner_requests_parallel"] == {(): 4}
    assert found["mlx_runner_rank_latency_seconds"] == {(): 0.00025}
    assert found["mlx_runner_rank_memory_bytes"] == {("3",): 70}


def published(stats: Stats = STATS) -> EngineStats:
    return EngineStats(stats, Distributions.empty(), (0,))


def text_of(numbers: EngineStats) -> str:
    return scrape(numbers, "")[0].decode()


def test_buckets_are_cumulative_and_end_with_all() -> None:
    numbers = published()
    for gap in (0.0001, 0.004, 0.004, 0.03, 99.0):
        numbers.distributions.gap_s.count(gap)
    found = families(text_of(numbers))
    buckets = found["mlx_runner_inter_token_latency_seconds_bucket"]
    counts = list(buckets.values())
    assert counts == sorted(counts)
    assert (buckets[("0.0005",)], buckets[("0.005",)], buckets[("0.03",)], buckets[("2.5",)]) == (1, 3, 4, 4)
    assert buckets[("+Inf",)] == found["mlx_runner_inter_token_latency_seconds_count"][()] == 5
    assert found["mlx_runner_inter_token_latency_seconds_sum"][()] == pytest.approx(99.0381)


def test_names_follow_the_rules_of_prometheus() -> None:
    """Base units in the name, `_total` for counters and for nothing else, help for each, no name twice."""
    stats = msgspec.structs.replace(STATS, cache=CacheCounts(budget_bytes=1))
    listed = list(text_string_to_metric_families(text_of(published(stats))))
    names = [family.name for family in listed]
    assert len(names) == len(set(names)) > 25
    assert "mlx_runner_memory_budget_bytes" not in names, "there is none"
    for family in listed:
        assert re.fullmatch(r"mlx_runner_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|milliseconds|kb|mb|ns)(_|$)", family.name)
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)


def full_name(metric: Metric) -> str:
    suffix = {Counter: "_total", Info: "info"}.get(type(metric), "")
    return f"mlx_runner_{metric.name}{suffix}"


def test_the_table_of_metrics_has_each_with_its_kind_and_label() -> None:
    """A name in the table that begins with `_` has the beginning of the first one in its row."""
    _, _, table = (DOCS / "operating.md").read_text().partition("| metric | kind | labels |\n| --- | --- | --- |\n")
    listed = []
    for row in table.partition("\n\n")[0].splitlines():
        _, names, kinds, labels = row.split("|", 3)
        found = re.findall(r"`(\w+)`", names)
        for name in found:
            for metric in METRICS:
                full = full_name(metric)
                if full.endswith(name) and found[0].startswith(full.removesuffix(name)):
                    listed.append(full)
                    assert type(metric).__name__.lower() in kinds, name
                    assert not metric.label or f"`{metric.label}`" in labels, name
    assert sorted(listed) == sorted(map(full_name, METRICS))
    assert sum(map(len, METRICS.values())) == len(list(annotations(EngineStats))), "each annotation is a sample"


def test_a_scraper_that_asks_for_open_metrics_gets_it() -> None:
    body, content_type = scrape(published(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_a_label_takes_any_name_of_a_model() -> None:
    """A person may read a scrape in a terminal, so it holds no character that one acts on."""
    stats = msgspec.structs.replace(STATS, model='me/"mine"\\:q4\n\x1b\x9bé')
    text = text_of(published(stats))
    assert all(line.isprintable() for line in text.splitlines())
    (info,) = families(text)["mlx_runner_info"]
    assert r'me/"mine"\:q4\n\u001b\u009bé' in info
