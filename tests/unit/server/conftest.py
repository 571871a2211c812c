"""The endpoints, their engine and a client of theirs."""

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import cast

import pytest
from aiohttp.test_utils import TestServer

from runner.engine.engine import Engine
from runner.server.routes import make_app
from tests.unit.server.script import Client, Script


@pytest.fixture
def engine() -> Script:
    return Script()


@pytest.fixture
def helper() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as helper:
        yield helper


@pytest.fixture
async def client(engine: Script, helper: Executor, aiohttp_client: Callable[..., Awaitable[Client]]) -> Client:
    app = make_app(cast("Engine", engine), helper)
    return await aiohttp_client(TestServer(app), server_kwargs={"handler_cancellation": True})
