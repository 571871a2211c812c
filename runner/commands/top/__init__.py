"""`mlx-runner top`: shows the numbers of a running runner in a terminal."""

import signal
import sys
from contextlib import suppress
from typing import NoReturn

from runner.errors import RunnerError
from runner.settings import TopSettings


def top(settings: TopSettings) -> NoReturn:
    """Shows the runner's numbers until Ctrl-C, or once if stdout is no terminal. RunnerError if no runner answers."""
    try:
        from runner.commands.top.view import Feed, print_once, watch
    except ImportError as error:
        raise RunnerError(
            f"mlx-runner top needs a package that is not installed ({error}): pip install 'rich>=14,<16';"
            f" the same numbers without it: curl {settings.url}/v1/stats"
        ) from error
    feed = Feed(settings.url)
    if settings.once or not sys.stdout.isatty():
        print_once(feed.stats())
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the terminal is restored
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        watch(feed)
    sys.exit(0)
