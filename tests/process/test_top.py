"""`mlx-runner top` with a real process. The other tests, with a stand-in, are in tests/unit/top."""

import asyncio
import subprocess

from scripts.tools.host.lib import Client, Process, Request
from tests.process.conftest import MAIN, RUNNER


async def test_top_shows_a_real_runner(shared: Process, client: Client) -> None:
    await client.complete(Request("<again>", {"num_predict": 3}))
    words = [*RUNNER, "top", "--port", str(shared.port), "--once"]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    title, _, *rows = done.stdout.splitlines()
    assert title.startswith(f"{MAIN}  ")
    assert [row.split()[0] for row in rows[:3]] == ["requests", "prompts", "answers"]
    assert "first token after" in rows[2]
