"""The table of `mlx-runner top`."""

from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from protocol.stats import CacheCounts, MemoryCounts, RequestCounts, RunningRequest, Stats, TokenCounts
from runner.commands.top.view import duration, view
from tests.process.page.stand_in import MEGABYTE, STATS

FULL = replace(
    STATS,
    uptime_s=185.0,
    ttft_s=0.42,
    requests=RequestCounts(running=1, queued=1, done=4, length=1, cancelled=2),
    tokens=TokenCounts(prompt=4000, cached=3000, generated=1234),
    cache=CacheCounts(budget_bytes=4 * MEGABYTE, held_bytes=MEGABYTE, nodes=3, misses={"window_passed": 2}),
    memory=MemoryCounts(used_bytes=21 * MEGABYTE, peak_bytes=35 * MEGABYTE, weights_bytes=7 * MEGABYTE),
    running=[
        RunningRequest(
            number=7, phase="decode", prompt=1000, cached=800, prefilled=1000, generated=50, max_tokens=200, age_s=6.0,
            tokens_per_s=12.5,
        ),
        RunningRequest(number=8, phase="queued", prompt=12_000, age_s=75.0),
    ],
)  # fmt: skip


def lines(stats: Stats, remark: str = "") -> list[str]:
    """As on paper 120 columns wide, with single spaces."""
    console = Console(file=StringIO(), width=120)
    with console.capture() as capture:
        console.print(view(stats, remark))
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip()]


def test_it_says_the_essentials() -> None:
    assert lines(FULL) == [
        "demo:latest LlamaForCausalLM · CPU · context 4,096 · cache trie · up 3 min 05 s · mlx-runner 0.1.0",
        "requests 1 running, 1 waiting, 5 answered, 2 cancelled",
        "prompts 4,000 tokens, 3,000 from the cache (75%)",
        "answers 1,234 tokens, 12.5 tokens/s now, first token after 0.4 s",
        "cache 1.0 MB of 4.0 MB in 3 nodes, live 0 B, paged out 0 B, restored 0 B, evicted 0 B",
        "misses 2 window passed",
        "memory 21.0 MB, peak 35.0 MB, weights 7.0 MB, MLX's reserve 0 B",
        "request phase prompt cached read written tokens/s age",
        "#7 answering 1,000 800 ━━━━━━━━━━━━ 50 of 200 12.5 6.0 s",
        "#8 waiting 12,000 0 0 1 min 15 s",
    ]


def test_events_that_never_happened_are_not_mentioned() -> None:
    told = lines(STATS)
    assert told[1:4] == ["requests 0 running, 0 waiting, 0 answered", "prompts 0 tokens", "answers 0 tokens"]
    assert told[-1] == "no request is running"
    assert lines(STATS, "it has ended")[-1] == "it has ended"


def test_a_name_cannot_steer_the_terminal() -> None:
    evil = "[red]\x1b]0;title\x07\u202e"
    told = "\n".join(lines(replace(FULL, model=evil, cache=CacheCounts(misses={evil: 1})), evil))
    assert told.count(r"[red]\u001b]0;title\u0007\u202e") == 3
    assert not set(told) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0384, "38 ms"),
        (9.94, "9.9 s"),
        (59.6, "1 min 00 s"),
        (3725, "1 h 02 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text
