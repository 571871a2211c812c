"""The process under test: this repository's runner, spawned by `scripts.tools.host.lib` on stores written here."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from protocol.stats import Stats
from scripts.tools.conformance.models import MAIN, SENTENCEPIECE, write_models
from scripts.tools.conformance.runners import CHUNK_TOKENS, caught
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import Client, Generation, Process, spawn
from scripts.tools.host.lib.generations import F
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store

__all__ = ["CHUNK_TOKENS", "MAIN", "RUNNER", "SENTENCEPIECE"]

FAULTY = (sys.executable, str(Path(__file__).parent / "faults" / "faulty.py"))
"""The runner with a fault in it."""
RANDOM = "random:latest"
MARKER = "mlx:latest"
"""A model whose name would put a marker into log lines if they were written unescaped."""


async def read_stats(client: Client) -> Stats:
    """Returns the statistics, which may be those of a moment ago."""
    return msgspec.json.decode((await client.send("GET", "/v1/stats")).body, type=Stats)


async def written(client: Client) -> None:
    """Returns when everything in memory is on disk. Statistics of the moment before the answer do not count."""
    await asyncio.sleep(0.3)
    while (disk := (await read_stats(client)).disk).pending_tokens or not disk.segments:
        await asyncio.sleep(0.05)


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="prlimit, F_SETPIPE_SZ, /dev/full, /proc")
CHUNKED = ["--prefill-chunk", str(CHUNK_TOKENS)]
SpawnModel = Callable[..., Process]
REQUEST_S = 120.0
"""The deadline of one request in these tests; a host would wait for ever."""
HOST = replace(F, request_timeout_s=REQUEST_S)


@contextmanager
def running(model: str, models_dir: Path | None, *arguments: str, generation: Generation = HOST) -> Iterator[Process]:
    """Yields a process that is ready, and ends it."""
    with spawn(RUNNER, model, models_dir=models_dir, generation=generation, arguments=arguments) as process:
        process.wait_ready(60)
        yield process


def command(*words: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `mlx-runner` with these words, and `given` on its standard input, to its end."""
    return subprocess.run(
        [*RUNNER, *words],
        input=given,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def processor_s(pid: int) -> float:
    """Returns the processor time that the threads of a process have taken."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the models of the conformance suite and those above."""
    directory = tmp_path_factory.mktemp("models")
    store = write_models(directory)
    write_store(store, MARKER, directory / "sources" / "main")
    write_store(store, RANDOM, write_checkpoint(directory / "random", "llama"))
    return store


@pytest.fixture(scope="session")
def shared(models_dir: Path) -> Iterator[Process]:
    """One running process of the main model, for every test that leaves it alive."""
    with running(MAIN, models_dir, *CHUNKED) as process:
        yield process
    assert not caught(process), "a whole session wrote no line that a host would take for an error"


@pytest.fixture
async def client(shared: Process) -> AsyncIterator[Client]:
    """A host's client of the shared process."""
    async with Client.of(shared) as client:
        yield client


@pytest.fixture
def start(models_dir: Path) -> Iterator[SpawnModel]:
    """Spawns a process of its own for one test and ends it afterwards."""
    processes = []

    def start(
        model: str = MAIN,
        arguments: Sequence[str] = (),
        *,
        executable: Sequence[str] = RUNNER,
        generation: Generation = HOST,
        models_dir: Path | str = models_dir,
        ready: bool = True,
        **more: object,
    ) -> Process:
        process = spawn(
            executable,
            model,
            models_dir=models_dir,
            generation=replace(generation, request_timeout_s=REQUEST_S),
            arguments=arguments,
            **more,  # type: ignore[arg-type]  # as spawn's own
        )
        processes.append(process)
        if ready:
            process.wait_ready(60)
        return process

    yield start
    for process in processes:
        process.kill()
