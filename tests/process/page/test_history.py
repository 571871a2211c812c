"""The page's history of the numbers, computed by its own module in a browser."""

import pytest
from msgspec.json import decode, encode
from msgspec.structs import replace

from protocol.stats import MemoryCounts, Stats, TokenCounts
from tests.lib.page_stand_in import STATS, StandIn
from tests.process.page.conftest import Look

pytestmark = pytest.mark.asyncio(loop_scope="session")

POINTS = 301
"""Ten minutes in steps of two seconds, both ends included."""
RUN = """async steps => {
  const { History } = await import("/page/history.js");
  const history = new History();
  let now = 0;
  for (const [at, stats] of steps) {
    now = at;
    if (stats === "end") history.end(at);
    else if (stats !== "look") history.add(at, stats);
  }
  return { hits: history.series("hits", now), memory: history.series("memory", now),
           speed: history.series("speed", now) };
}"""


def told(uptime_s: float, *, prompt: int = 0, cached: int = 0, generated: int = 0, used: int = 0) -> Stats:
    return replace(
        STATS,
        uptime_s=uptime_s,
        tokens=TokenCounts(prompt=prompt, cached=cached, generated=generated),
        memory=MemoryCounts(used_bytes=used),
    )


async def drawn(look: Look, stand_in: StandIn, *steps: tuple[float, Stats | str]) -> dict[str, list[float | None]]:
    """The three lines, which begin with the last point."""
    view = await look(stand_in.url)
    made: dict[str, list[float | None]] = await view.page.evaluate(RUN, decode(encode(steps)))
    assert {len(line) for line in made.values()} == {POINTS}
    return {name: line[::-1] for name, line in made.items()}


async def test_the_hit_rate_is_that_of_the_prompts_of_one_minute(stand_in: StandIn, look: Look) -> None:
    lines = await drawn(
        look,
        stand_in,
        (100, told(1, prompt=1000)),
        (200, told(101, prompt=1100, cached=90)),
        (240, told(141, prompt=1200, cached=100)),
        (310, "look"),
    )
    assert [lines["hits"][ago // 2] for ago in (100, 60, 20)] == [0.9, 0.5, 0.1]
    assert lines["hits"][112 // 2] is None, "prompts before the page was opened do not count"
    assert lines["hits"][0] is None, "no prompt in the last minute is no hit rate of 0"


async def test_an_absence_is_a_gap_and_another_runner_counts_from_its_own_start(stand_in: StandIn, look: Look) -> None:
    lines = await drawn(
        look,
        stand_in,
        (100, told(500, prompt=9000, cached=9000, generated=9000, used=5)),
        (140, "end"),
        (200, told(1, prompt=10, generated=1, used=6)),
        (220, told(21, prompt=20, cached=5, generated=3, used=6)),
    )
    assert [lines["memory"][ago // 2] for ago in (0, 20, 22, 80, 82, 120)] == [6, 6, None, None, 5, 5]
    assert lines["hits"][0] == 0.5
    assert min(value for value in lines["speed"] if value is not None) == 0
