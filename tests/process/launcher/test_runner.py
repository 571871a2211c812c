"""The stand-in starts our real runner through the shim, as a host would, and the runner answers."""

import os
import signal
from pathlib import Path

from scripts.tools.demo.questions import CONVERSATIONS
from scripts.tools.demo.subjects import GREEDY, MODEL, demo_store
from scripts.tools.host.lib import Client, F, Request, free_port, write_decoys
from tests.process.launcher.standin import SCRIPT, Host, Installation, environment


async def test_our_runner_serves_a_host_that_knows_nothing_of_it(installation: Installation, tmp_path: Path) -> None:
    write_decoys(installation.libraries)
    for name in ("runner", "mlx", "aiohttp", "argparse"):  # what lies where the user is, is not the runner's
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    turn = CONVERSATIONS[0].turns[0]
    port = free_port()
    with demo_store() as models:
        environ = environment(tmp_path, OLLAMA_MODELS=str(models), PYTHONPATH=str(tmp_path))
        with Host([*SCRIPT, str(installation.ollama)], environ, tmp_path) as host:
            pid = host.begin(F.argv(MODEL, port))
            log = []
            while "msg=listening" not in (line := host.line().decode()):
                log.append(line)
            assert any(f"model={MODEL}" in line for line in log)
            async with Client(port) as client:
                completion = await client.complete(Request(CONVERSATIONS[0].prompt(0), GREEDY), tokenize=True)
            assert completion.text == turn.answer
            assert completion.context
            os.kill(pid, signal.SIGINT)
            while not (line := host.line().decode()).startswith("ended "):
                log.append(line)
            assert line == f"ended {-signal.SIGINT}"
            assert not any("rror" in line for line in log)
