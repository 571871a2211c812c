"""The output of the numbers: once to any stream, or continuously on a whole terminal."""

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
    """Prints one table, as wide as it needs to be if stdout is no terminal."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _COLUMNS)
    console.print(view(stats))


def watch(feed: Feed) -> None:
    """Follows the runner forever, also across a restart. LostError if none answers at first."""
    stats = feed.stats()
    with Live(view(stats), screen=True, refresh_per_second=1, vertical_overflow="crop") as live:
        while True:
            try:
                for stats in feed.follow():
                    live.update(view(stats), refresh=True)
            except LostError as error:
                live.update(view(stats, f"{error}. This is its last state; press Ctrl-C to exit."), refresh=True)
            sleep(_AGAIN_S)
