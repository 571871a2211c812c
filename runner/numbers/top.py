"""`mlx-runner top`: shows the numbers of a running runner in a terminal."""

import http.client
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from protocol.stats import Stats
from runner.errors import RunnerError
from runner.settings import TopSettings

_PATIENCE_S = 5.0
_SILENCE_S = 40.0
"""The longest wait for an event. A runner without news sends a heartbeat every 15 s."""
_decode = msgspec.json.Decoder(Stats).decode


def top(settings: TopSettings) -> NoReturn:
    """Shows the runner's numbers until Ctrl-C, or once with `--once` or if stdout is no terminal. Raises RunnerError if
    no runner answers."""
    try:
        from runner.numbers.table import print_once, watch_runner
    except ImportError as error:
        raise RunnerError(
            f"mlx-runner top needs a package that is not installed ({error}): pip install 'rich>=14,<16';"
            f" the same numbers without it: curl {settings.url}/v1/stats"
        ) from error
    feed = StatsFeed(settings.url)
    if settings.once or not sys.stdout.isatty():
        print_once(feed.stats())
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):  # end by an exception, which lets rich restore the terminal
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        watch_runner(feed.stats(), feed.follow)
    sys.exit(0)


class StatsFeed:
    """Reads the numbers of one runner over HTTP. Every RunnerError names the fault and the remedy."""

    def __init__(self, url: str) -> None:
        """`url` is `http://host:port`."""
        self.url = url
        self._address = urlsplit(url).netloc

    def stats(self) -> Stats:
        """Returns the current numbers."""
        with self._response("/v1/stats", _PATIENCE_S) as response:
            return self._decoded(response.read())

    def follow(self) -> Iterator[Stats]:
        """Yields the numbers now, and again after each change. Raises RunnerError when the runner ends."""
        with self._response("/v1/events", _SILENCE_S) as response:
            event = b""
            while line := response.readline():
                name, _, value = line.strip().partition(b": ")
                if name == b"event":
                    event = value
                elif name == b"data" and event == b"stats":
                    yield self._decoded(value)
        raise RunnerError(f"the runner on {self._address} has ended")

    @contextmanager
    def _response(self, path: str, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        try:
            with closing(http.client.HTTPConnection(self._address, timeout=timeout_s)) as connection:
                connection.request("GET", path)
                response = connection.getresponse()
                if response.status != HTTPStatus.OK:
                    raise self._no_runner(f"it answers {response.status} to GET {path}")
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error

    def _decoded(self, data: bytes) -> Stats:
        try:
            return _decode(data)
        except msgspec.DecodeError as error:
            raise self._no_runner(f"its numbers have another form: {error}") from error

    def _lost(self, error: Exception) -> RunnerError:
        if isinstance(error, ConnectionRefusedError):
            return RunnerError(
                f"nothing listens on {self._address}: start the runner, or give the port that its log"
                " (`listening url=...`) or `ps` (`--port N`) shows"
            )
        if isinstance(error, TimeoutError):
            return RunnerError(f"the process on {self._address} does not answer: look at its log, or end it")
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
            return self._no_runner("it does not speak HTTP")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return RunnerError(f"no answer from {self._address} ({reason.lower()}): is the runner still running?")

    def _no_runner(self, why: str) -> RunnerError:
        return RunnerError(
            f"the process on {self._address} is not a runner of this version ({why}): give the runner's own port,"
            " not the port of its host"
        )
