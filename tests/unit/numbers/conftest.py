"""The endpoints of the numbers beside those of the server, and an engine whose numbers a test sets."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import TypeVar, cast

import pytest
from aiohttp.test_utils import TestServer

from protocol.stats import CacheNode
from runner.engine.engine import Engine
from runner.engine.parts import Parts
from runner.numbers.endpoints import StatsEndpoints
from runner.numbers.journal import Distributions, EngineStats
from runner.numbers.stats_cache import engine_stats
from runner.server.routes import make_app
from tests.lib.page_stand_in import STATS
from tests.unit.server.conftest import helper
from tests.unit.server.script import Client, Script

__all__ = ["Counted", "client", "engine", "helper"]

Answer = TypeVar("Answer")


class Counted(Script):
    """Stands in for an engine that is asked about its numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = STATS
        self.nodes: list[CacheNode] = []
        self.mark = 0
        self.asked: list[str] = []

    async def ask(self, question: Callable[[Parts], Answer]) -> Answer:
        about_all = question is engine_stats
        self.asked.append("stats" if about_all else "cache")
        everything = EngineStats(self.stats, Distributions.empty(), (self.mark,))
        return cast("Answer", everything if about_all else self.nodes)


@pytest.fixture
def engine() -> Counted:
    return Counted()


@pytest.fixture
async def client(engine: Counted, helper: Executor, aiohttp_client: Callable[..., Awaitable[Client]]) -> Client:
    routes = StatsEndpoints(cast("Engine", engine), helper).routes
    app = make_app(cast("Engine", engine), helper, routes)
    return await aiohttp_client(TestServer(app), server_kwargs={"handler_cancellation": True})
