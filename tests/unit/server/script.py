"""An engine without a model behind the real endpoints; the test decides its answers."""

import asyncio
import json
from concurrent.futures import Future

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient
from aiohttp.web import Application
from aiohttp.web import Request as HttpRequest

from runner.engine.events import Event, Outbox
from runner.engine.ports import EncoderUse, NoVision, Vision
from runner.engine.request import Limits, Request
from runner.errors import RequestError
from runner.grammar.compiler import Compiler
from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import byte_level
from tests.lib.local_grammar import LocalGrammar

CONTEXT = 100
VOCABULARY = 200  # fewer than the tokenizer has, as in real models with tokens for pictures
MEMORY_BYTES = 12345
Client = TestClient[HttpRequest, Application]


class Script:
    """Stands in for the engine: keeps submitted requests, whose streams the test feeds."""

    def __init__(self) -> None:
        files = {"tokenizer.json": json.dumps(byte_level()).encode(), "config.json": b"{}"}
        self.tokenizer = open_tokenizer(files.get)
        self.limits = Limits(CONTEXT, VOCABULARY)
        self.vision: Vision = NoVision()
        self.encoder_use = EncoderUse()
        self.memory_bytes = MEMORY_BYTES
        self.submitted: list[Request] = []
        self.refused = self.failed = 0

    def submit(self, request: Request) -> None:
        request.grammar = Future() if request.format is not None else None
        self.submitted.append(request)

    def compile(self, request: Request) -> None:
        assert request.format is not None
        assert request.grammar is not None
        try:
            request.grammar.set_result(LocalGrammar(Compiler(self.tokenizer, VOCABULARY), request.format))
        except RequestError as error:
            request.grammar.set_exception(error)

    async def next(self) -> Request:
        """The next request that arrives."""
        async with asyncio.timeout(5):
            while not self.submitted:
                await asyncio.sleep(0.001)
        return self.submitted.pop(0)

    async def posted(self, client: Client, **more: object) -> tuple[asyncio.Task[ClientResponse], Request]:
        """A completion that has arrived, and its answer to come."""
        posted = asyncio.create_task(client.post("/completion", json={"Prompt": "xy", **more}))
        return posted, await self.next()

    def tell(self, request: Request, *events: Event) -> None:
        """The events of one slice."""
        outbox = Outbox(asyncio.get_running_loop())
        for event in events:
            outbox.put(request.stream, event)
        outbox.send()
