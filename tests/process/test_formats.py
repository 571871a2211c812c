"""Structured output of a running process: memory. What formats mean is in tests/unit/grammar."""

import asyncio
from dataclasses import replace
from pathlib import Path

from scripts.tools.host.lib import Client, Request
from scripts.tools.host.lib.generations import G
from tests.process.conftest import RANDOM, REQUEST_S, running

HOST = replace(G, request_timeout_s=REQUEST_S)


async def test_grammars_that_nobody_uses_do_not_fill_a_small_budget(models_dir: Path) -> None:
    """Each takes 3 MB while it is used: five fill the budget."""
    with running(RANDOM, models_dir, "--memory", "16M", generation=HOST) as process:
        async with Client.of(process) as client:
            wanted = [{"enum": [f"{number}{number}"]} for number in range(8)]
            requests = [Request("x", {"num_predict": 9}, format=each) for each in (*wanted, None, None)]
            answers = await asyncio.gather(*map(client.complete, requests))
            answers += [await client.complete(request) for request in requests]
    assert [answer.text for answer in answers[:8]] == [f'"{number}{number}"' for number in range(8)]
