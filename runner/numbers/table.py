"""Shows the numbers of a runner as a table: once on any stream, or continuously on a terminal."""

import sys
from collections.abc import Callable, Iterator
from time import sleep, strftime
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from protocol.stats import RunningRequest, Stats
from runner.errors import RunnerError
from runner.logs import printable
from runner.sizes import sized

_COLUMNS = 120
_AGAIN_S = 1.0
_LABEL = 10
_PHASES = {"queued": "waiting", "prefill": "reading", "decode": "answering"}
_ROW = "{:<8} {:<12} {:>8} {:>8}  {:<16} {:>8} {:>12}"
"""A row of 80 columns. A narrower terminal cuts off its right end."""
_HEAD = _ROW.format("request", "phase", "prompt", "cached", "written", "tokens/s", "age")


def view(stats: Stats, remark: str = "", console: Console | None = None) -> RenderableType:
    """Returns the table, cut to the height of `console` if that is given. `remark` tells why the numbers are old."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", min_width=_LABEL)
    facts.add_column()
    for label, value in _facts(stats):
        facts.add_row(label, Text(printable(value)))
    parts: list[RenderableType] = [Text(printable(stats.model), style="bold"), _about(stats, whole=console is None)]
    if remark:
        parts.append(Text(printable(remark), style="reverse"))
    parts += [Text(), facts, Text()]
    rows = [_row(request) for request in stats.running]
    if console is not None:
        room = max(
            0, console.height - len(console.render_lines(Group(*parts))) - 2
        )  # rows of requests; a last line tells how many more there are
        if len(rows) > room + 1:
            rows[room:] = [Text(f"and {len(rows) - room:,} more", style="dim")]
    parts += [Text(_HEAD, style="dim", no_wrap=True), *rows] if rows else [Text("no request is running", style="dim")]
    return Group(*parts)


def _about(stats: Stats, *, whole: bool) -> Text:
    about = [stats.architecture, stats.device.upper(), f"context {stats.context_length:,}", f"cache {stats.cache_kind}"]
    about += [f"up {duration(stats.uptime_s)}", f"mlx-runner {stats.version}", stats.path]
    return Text(printable(" · ".join(filter(None, about))), style="dim", no_wrap=not whole, overflow="ellipsis")


def _facts(stats: Stats) -> Iterator[tuple[str, str]]:
    requests, tokens, cache, memory = stats.requests, stats.tokens, stats.cache, stats.memory
    ended = {
        "answered": requests.done + requests.length,
        "cancelled": requests.cancelled,
        "failed": requests.failed,
        "refused": requests.refused,
    }
    counted = [f"{count:,} {name}" for name, count in ended.items() if count or name == "answered"]
    running = f"{requests.running:,} of {stats.parallel:,} running"
    yield "requests", ", ".join([running, f"{requests.queued:,} waiting", *counted])
    hits = f", {tokens.cached:,} from the cache ({tokens.cached / tokens.prompt:.0%})" if tokens.prompt else ""
    yield "prompts", f"{tokens.prompt:,} tokens{hits}"
    speed = sum(request.tokens_per_s for request in stats.running if request.phase == "decode")
    first = f", the last began after {duration(stats.ttft_s)}" if stats.ttft_s is not None else ""
    yield "answers", f"{tokens.generated:,} tokens{f', {speed:,.1f} tokens/s now' if speed else ''}{first}"
    tried = {source: count for source, count in stats.drafts.drafted.items() if source != "known"}
    if any(tried.values()):
        right = sum(stats.drafts.accepted.get(source, 0) for source in tried)
        yield "drafts", f"{right:,} of {sum(tried.values()):,} tokens right"
    yield (
        "cache",
        f"{sized(cache.held_bytes)}{_of(cache.budget_bytes)} in {cache.nodes:,} nodes,"
        f" live {sized(cache.live_bytes)}, paged out {sized(cache.paged_bytes)},"
        f" restored {sized(cache.restored_bytes)}, evicted {sized(cache.evicted_bytes)}",
    )
    if cache.misses:
        yield "misses", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in cache.misses.items())
    yield (
        "memory",
        f"{sized(memory.used_bytes)}{_of(memory.budget_bytes)}, peak {sized(memory.peak_bytes)},"
        f" weights {sized(memory.weights_bytes)}, MLX's reserve {sized(memory.reusable_bytes)}",
    )


def _row(request: RunningRequest) -> Text:
    read = f" {request.prefilled / max(1, request.prompt):.0%}" if request.phase == "prefill" else ""
    row = _ROW.format(
        f"#{request.number}",
        printable(_PHASES.get(request.phase, request.phase)) + read,
        f"{request.prompt:,}",
        f"{request.cached:,}",
        f"{request.generated:,}{f' of {request.max_tokens:,}' if request.max_tokens > 0 else ''}",
        f"{request.tokens_per_s:,.1f}" if request.tokens_per_s else "",
        duration(request.age_s),
    )
    return Text(row, no_wrap=True)


def duration(seconds: float) -> str:
    """Formats a duration: `40 ms`, `0.4 s`, `12 s`, `3 min 05 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _of(budget_bytes: int | None) -> str:
    return "" if budget_bytes is None else f" of {sized(budget_bytes)}"


def print_once(stats: Stats) -> None:
    """Prints the table once. If stdout is no terminal, the table is 120 columns wide."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _COLUMNS)
    console.print(view(stats))


def watch_runner(stats: Stats, follow: Callable[[], Iterator[Stats]]) -> NoReturn:
    """Shows `stats`, then all numbers that `follow` yields. After a RunnerError shows why, and calls `follow` again."""
    console, remark = Console(), ""
    with Live(view(stats, console=console), console=console, screen=True, refresh_per_second=1) as live:
        while True:
            try:
                for stats in follow():
                    remark = ""
                    live.update(view(stats, console=console), refresh=True)
            except RunnerError as error:
                remark = remark or f"These are the last figures, from {strftime('%X')} (Ctrl-C to exit): {error}"
                live.update(view(stats, remark, console), refresh=True)
            sleep(_AGAIN_S)
