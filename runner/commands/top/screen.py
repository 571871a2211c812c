"""Where the numbers are written: once to any output, or again and again on a terminal of their own."""

import sys
from time import sleep

from rich.console import Console
from rich.live import Live

from protocol.stats import Stats
from runner.commands.top.feed import Feed, LostError
from runner.commands.top.view import view

_COLUMNS = 120
_AGAIN_S = 1.0


def print_once(stats: Stats) -> None:
    """One table. Where it goes to no terminal it is as wide as it must be."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _COLUMNS)
    console.print(view(stats))


def watch(feed: Feed) -> None:
    """Follows the runner for ever, across its end and its return. LostError if there is none to begin with."""
    stats = feed.stats()
    with Live(view(stats), screen=True, refresh_per_second=1, vertical_overflow="crop") as live:
        while True:
            try:
                for stats in feed.follow():
                    live.update(view(stats), refresh=True)
            except LostError as error:
                live.update(view(stats, f"{error}. This is its last state; Ctrl-C ends."), refresh=True)
            sleep(_AGAIN_S)
