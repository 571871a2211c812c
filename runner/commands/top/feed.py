"""The numbers of a runner, read over its port."""

import http.client
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec

from protocol.stats import Stats
from runner.errors import RunnerError

_PATIENCE_S = 5.0
_SILENCE_S = 40.0
"""A runner without news sends a heartbeat every 15 s."""
_decode = msgspec.json.Decoder(Stats).decode


class LostError(RunnerError):
    """The runner does not answer."""


class Feed:
    """Reads the numbers of one runner. Every error says what is wrong, and what to do."""

    def __init__(self, url: str) -> None:
        """`url` is `http://host:port`."""
        self.url = url
        self._address = urlsplit(url).netloc

    def stats(self) -> Stats:
        """Returns the current numbers."""
        connection, response = self._get("/v1/stats", _PATIENCE_S)
        with closing(connection):
            try:
                return self._decoded(response.read())
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from error

    def follow(self) -> Iterator[Stats]:
        """Yields the numbers whenever they change, until LostError."""
        connection, response = self._get("/v1/events", _SILENCE_S)
        with closing(connection):
            try:
                event = b""
                while line := response.readline():
                    name, _, value = line.strip().partition(b": ")
                    if name == b"event":
                        event = value
                    elif name == b"data" and event == b"stats":
                        yield self._decoded(value)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from error
        raise LostError(f"the runner on {self._address} has ended")

    def _get(self, path: str, timeout_s: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._lost(error) from error
        if response.status != HTTPStatus.OK:
            connection.close()
            raise self._no_runner(f"it answers {response.status} to GET {path}")
        return connection, response

    def _decoded(self, data: bytes) -> Stats:
        try:
            return _decode(data)
        except msgspec.DecodeError as error:
            raise self._no_runner(f"its numbers have another form: {error}") from error

    def _lost(self, error: Exception) -> LostError:
        if isinstance(error, ConnectionRefusedError):
            return LostError(
                f"nothing listens on {self._address}: start the runner, or give the port that its log"
                " (`listening url=...`) or `ps` (`--port N`) shows"
            )
        if isinstance(error, TimeoutError):
            return LostError(f"the process on {self._address} does not answer: look at its log, or end it")
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
            return self._no_runner("it does not speak HTTP")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return LostError(f"no answer from {self._address} ({reason.lower()}): is the runner still running?")

    def _no_runner(self, why: str) -> LostError:
        return LostError(
            f"the process on {self._address} is not a runner of this version ({why}): give the runner's own port,"
            " not the port of its host"
        )
