"""A host's HTTP client: Go's default one as far as a runner can tell (docs/internals/wire.md, 2)."""

import json
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self
from weakref import WeakSet

import aiohttp

from scripts.tools.host.lib.answers import Answer, Status, decode_answer, decode_ids, decode_status
from scripts.tools.host.lib.generations import F, Generation
from scripts.tools.host.lib.golang import body_error, request_error
from scripts.tools.host.lib.output import OutputScanner
from scripts.tools.host.lib.process import Process
from scripts.tools.host.lib.requests import Request, encode

LINE_LIMIT_BYTES = 65536
"""The longest line that a host reads, its newline included; without one it is one byte less."""
_IDLE_S = 90
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


class StatusError(Exception):
    """The runner refused a request: an HTTP status before the stream, or an `Error` object in it (`streamed`)."""

    def __init__(self, status: int, text: str, *, streamed: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.streamed = streamed


class StreamError(Exception):
    """Connecting or reading failed. As in the host, captured output takes the place of the reason."""


class Reply(NamedTuple):
    """A whole HTTP answer. `headers` has lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def _answered(reply: Reply) -> bytes:
    if reply.status != 200:
        raise StatusError(reply.status, reply.text.strip())
    return reply.body


@dataclass
class Completion:
    """A finished completion: what a host delivers, and what a test wants to know beyond it."""

    text: str = ""
    answers: list[Answer] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    """The same lines before decoding, without their newline."""
    arrivals: list[float] = field(default_factory=list)
    """`time.monotonic()` of each line."""
    context: list[int] | None = None
    """The ids of prompt and answer, when tokenize was asked for."""
    cancelled: bool = False

    @property
    def final(self) -> Answer:
        if not self.answers or not self.answers[-1].done:
            raise AssertionError(f"no final line after {self.text!r}")
        return self.answers[-1]

    @property
    def pieces(self) -> list[str]:
        return [answer.content for answer in self.answers if answer.content]


class Stream:
    """One running completion: an async context manager that yields answers until the final one.

    The final answer is yielded while the connection is still open, as a host handles it; then, or when the block is
    left early (a cancel), the connection is closed.
    """

    def __init__(self, client: "Client", request: Request) -> None:
        self._client = client
        self._request = request
        self._response: aiohttp.ClientResponse | None = None
        self.lines: list[bytes] = []
        self.dropped: list[bytes] = []
        """Lines that the host's decoder refused."""

    async def __aenter__(self) -> Self:
        self._response = await self._client.post_completion(self._request)
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._response is not None:
            self._response.close()

    async def __aiter__(self) -> AsyncIterator[Answer]:
        async for line in self._lines():
            self.lines.append(line)
            answer = decode_answer(line, self._client.generation)
            if answer is None:
                self.dropped.append(line)
                continue
            if answer.error is not None:
                raise StatusError(answer.error.status_code, answer.error.text, streamed=True)
            yield answer
            if answer.done:
                return

    async def _lines(self) -> AsyncIterator[bytes]:
        """Go's `bufio.Scanner` with a 64 KiB buffer; a rest without newline is a line too."""
        buffer = b""
        async for chunk in self._chunks():
            *complete, buffer = (buffer + chunk).split(b"\n")
            for line in complete:
                self._check(line)
                yield line
            self._check(buffer)
        if buffer:
            yield buffer

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes; a host undoes gzip, the only coding that it asks for."""
        assert self._response is not None
        zipped = self._response.headers.get("Content-Encoding", "").lower() == "gzip"
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress if zipped else None
        try:
            async for chunk in self._response.content.iter_any():
                yield inflate(chunk) if inflate else chunk
        except _BROKEN as error:
            raise self._client.failure(error, reading=True) from error

    def _check(self, line: bytes) -> None:
        if len(line) >= LINE_LIMIT_BYTES:
            raise self._client.captured_or("bufio.Scanner: token too long")


class Client:
    """Talks to one runner as one host generation does. Belongs to one event loop; an async context manager."""

    def __init__(self, port: int, generation: Generation = F, output: OutputScanner | None = None) -> None:
        self.generation = generation
        self._url = f"http://127.0.0.1:{port}/completion"
        self._output = output
        self._responses: WeakSet[aiohttp.ClientResponse] = WeakSet()
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            headers={"User-Agent": "Go-http-client/1.1", "Accept-Encoding": "gzip"},
            skip_auto_headers=["Accept", "Content-Type"],
            timeout=aiohttp.ClientTimeout(total=generation.request_timeout_s),
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            trust_env=False,
        )

    @classmethod
    def of(cls, process: Process) -> Self:
        """The client of that process's generation; its captured output shows in `StreamError`."""
        return cls(process.port, process.generation, process.output)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Readers of answers that have not ended get a `StreamError`, or an error of the HTTP client."""
        for response in list(self._responses):
            # A session that closes forgets its readers: they would wait for ever.
            response.content.set_exception(aiohttp.ClientPayloadError("the client is closed"))
        await self._session.close()

    def failure(self, error: Exception, *, reading: bool = False) -> StreamError:
        """The error that the host's user would read; `reading` when the body had begun."""
        return self.captured_or(body_error(error) if reading else request_error(error, self._url))

    def captured_or(self, text: str) -> StreamError:
        """Returns the captured output of the runner in place of `text`, if this host does that for requests."""
        output = self._output
        captured = output.captured if output is not None and output.rule.in_requests else ""
        return StreamError(f"mlx runner failed: {captured}" if captured else text)

    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Any request, its answer read to the end; redirects are not followed."""
        async with self._session.request(method, path, data=body, headers=headers, allow_redirects=False) as response:
            self._responses.add(response)
            content = await response.read()
            return Reply(response.status, {name.lower(): value for name, value in response.headers.items()}, content)

    async def ask(self, path: str, body: object) -> dict[str, object]:
        """Posts JSON, and returns the object that comes back. Raises `StatusError`."""
        reply = await self.send("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = json.loads(_answered(reply))
        return answer if isinstance(answer, dict) else {}

    async def status(self) -> Status:
        """The host's health check. Raises `StatusError`, `UndecodableError`."""
        return decode_status(_answered(await self.send("GET", "/v1/status")))

    async def ping(self) -> Status | None:
        """Asks the generation's readiness path, as hosts do before each request to a loaded model; follows redirects.

        None for the generation that looks at the HTTP status alone. Raises `StatusError`, `UndecodableError`, and
        what the HTTP client raises.
        """
        async with self._session.get(self.generation.ready_path) as response:
            if response.status != 200:
                raise StatusError(response.status, f"health check failed: {response.status}")
            return decode_status(await response.read()) if self.generation.ready_decodes else None

    async def tokenize(self, text: str) -> list[int]:
        reply = await self.send("POST", "/v1/tokenize", text.encode(), {"Content-Type": "text/plain"})
        return decode_ids(reply.body)

    async def post_completion(self, request: Request) -> aiohttp.ClientResponse:
        """The open response, headers read. Raises `StatusError` for anything but 200, `StreamError`."""
        try:
            response = await self._session.post(
                "/completion",
                data=encode(request, self.generation),
                headers={"Content-Type": "application/json"},
                allow_redirects=True,
            )
        except _BROKEN as error:
            raise self.failure(error) from error
        self._responses.add(response)
        if response.status == 200:
            return response
        try:
            text = await response.text(errors="replace")
        except _BROKEN:
            text = ""  # a host reads what it can and looks at no error
        raise StatusError(response.status, text.strip())

    def stream(self, request: Request) -> Stream:
        return Stream(self, request)

    async def complete(
        self, request: Request, *, tokenize: bool = False, cancel_after: int | None = None
    ) -> Completion:
        """Reads a completion to its end. `tokenize` asks for the ids of prompt and answer while the final line is
        handled, as `/api/generate` does; `cancel_after` is the number of lines after which the connection is closed."""
        completion = Completion()
        async with self.stream(request) as stream:
            async for answer in stream:
                completion.arrivals.append(time.monotonic())
                completion.answers.append(answer)
                completion.text += answer.content
                if answer.done and tokenize:
                    completion.context = await self.tokenize(request.prompt + completion.text)
                if len(completion.answers) == cancel_after and not answer.done:
                    completion.cancelled = True
                    break
        completion.lines = stream.lines
        return completion
