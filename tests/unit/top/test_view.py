"""The table of `mlx-runner top`."""

from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from protocol.stats import CacheCounts, DraftCounts, MemoryCounts, RequestCounts, RunningRequest, Stats, TokenCounts
from runner.numbers.table import duration, view
from tests.lib.page_stand_in import MEGABYTE, STATS

FULL = replace(
    STATS,
    uptime_s=185.0,
    ttft_s=0.42,
    requests=RequestCounts(running=2, queued=11, done=4, length=1, cancelled=2),
    tokens=TokenCounts(prompt=4000, cached=3000, generated=1234),
    drafts=DraftCounts(
        drafted={"own": 300, "path": 69, "model": 20, "known": 7}, accepted={"own": 300, "model": 21, "known": 7}
    ),
    cache=CacheCounts(budget_bytes=4 * MEGABYTE, held_bytes=MEGABYTE, nodes=3, misses={"window_passed": 2}),
    memory=MemoryCounts(used_bytes=21 * MEGABYTE, peak_bytes=35 * MEGABYTE, weights_bytes=7 * MEGABYTE),
    running=[
        RunningRequest(
            number=7, phase="decode", prompt=1000, cached=800, prefilled=1000, generated=50, max_tokens=200, age_s=6.0,
            tokens_per_s=12.5,
        ),
        RunningRequest(number=8, phase="prefill", prompt=5000, prefilled=4500, max_tokens=9, age_s=0.5),
        *(RunningRequest(number=number, phase="queued", prompt=12_000, age_s=75.0) for number in range(9, 20)),
    ],
)  # fmt: skip


def lines(stats: Stats, remark: str = "", console: Console | None = None) -> list[str]:
    """Returns the lines, with single spaces, on paper 120 columns wide or on a terminal."""
    paper = console or Console(file=StringIO(), width=120)
    with paper.capture() as capture:
        paper.print(view(stats, remark, console))
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip()]


def test_it_says_the_essentials() -> None:
    told = lines(FULL)
    assert told[:12] == [
        "demo:latest",
        "LlamaForCausalLM · CPU · context 4,096 · cache trie · up 3 min 05 s · mlx-runner 0.1.0",
        "requests 2 of 4 running, 11 waiting, 5 answered, 2 cancelled",
        "prompts 4,000 tokens, 3,000 from the cache (75%)",
        "answers 1,234 tokens, 12.5 tokens/s now, the last began after 0.4 s",
        "drafts 321 of 389 tokens right",
        "cache 1.0 MB of 4.0 MB in 3 nodes, live 0 B, paged out 0 B, restored 0 B, evicted 0 B",
        "misses 2 window passed",
        "memory 21.0 MB, peak 35.0 MB, weights 7.0 MB, MLX's reserve 0 B",
        "request phase prompt cached written tokens/s age",
        "#7 answering 1,000 800 50 of 200 12.5 6.0 s",
        "#8 reading 90% 5,000 0 0 of 9 0.5 s",
    ]
    assert told[12:] == [f"#{number} waiting 12,000 0 0 1 min 15 s" for number in range(9, 20)]


def test_events_that_never_happened_are_not_mentioned() -> None:
    told = lines(STATS)
    assert told[2:5] == ["requests 0 of 4 running, 0 waiting, 0 answered", "prompts 0 tokens", "answers 0 tokens"]
    assert told[-1] == "no request is running"


@pytest.mark.parametrize(
    ("height", "cut"), [(27, []), (26, ["and 2 more"]), (24, ["and 4 more"]), (9, ["and 13 more"])]
)
def test_on_a_terminal_it_says_how_many_requests_have_no_room(height: int, cut: list[str]) -> None:
    terminal = Console(file=StringIO(), width=80, height=height)
    told = lines(replace(FULL, path="/a/long/path" * 9), "it has ended", terminal)
    assert told[1].endswith("…"), "one line, whatever the path"
    assert told[2] == "it has ended", "above all that may be cut off"
    assert [line for line in told if line.startswith("and")] == cut
    assert len(told) + 2 == max(height, 15), "and two empty lines"


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
