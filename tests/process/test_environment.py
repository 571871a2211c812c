"""Unusual environments: a C locale, names that are not UTF-8, few threads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scripts.tools.host.lib import Client, Request, capture
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.sources import write_source
from tests.process.conftest import SpawnModel, command, read_stats

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0"}
NO_TEXT = os.fsdecode(b"mod\xe8le")
"""A name in Latin-1."""


@pytest.mark.parametrize(
    ("name", "environment", "shown"),
    [("modèle-ü", C_LOCALE, "modèle-ü"), (NO_TEXT, C_LOCALE, "mod�le"), (NO_TEXT, {}, "mod�le")],
    ids=["a C locale", "no text and a C locale", "no text"],
)
async def test_a_directory_may_have_any_name(
    name: str, environment: dict[str, str], shown: str, tmp_path: Path, start: SpawnModel
) -> None:
    """The runner reads unstacked experts itself and leaves the rest to MLX, which accepts names in UTF-8 only."""
    directory = write_source(tmp_path / "plain", "deepseek-v3").rename(tmp_path / name)
    process = start(str(directory), environment=environment)
    async with Client.of(process) as client:
        assert (await client.complete(Request("ab", {"num_predict": 3}))).final.done
        body = msgspec.json.encode({"Prompt": "ab", "Format": {"enum": ["ba"]}})
        assert b'"Done":true' in (await client.send("POST", "/completion", body)).body, "whose process finds it, too"
        stats = await read_stats(client)
    assert (stats.model, stats.path) == (shown, str(tmp_path / shown))
    found = command("check", str(directory), **environment)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.fixture
def few_threads(tmp_path: Path) -> Path:
    """A library that limits a process to MOST_THREADS threads."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no C compiler, or no LD_PRELOAD")
    library = tmp_path / "few_threads.so"
    source = Path(__file__).with_name("few_threads.c")
    words = [compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(library), "-ldl"]
    subprocess.run(words, check=True, timeout=120)
    return library


@pytest.mark.parametrize("most", [0, 4, 6, 12])
def test_too_few_threads_are_reported_as_an_error(
    most: int, few_threads: Path, tmp_path: Path, start: SpawnModel
) -> None:
    """MLX aborts with four or five threads and waits for ever with six."""
    directory = write_checkpoint(tmp_path / "d", "llama")
    environment = {"LD_PRELOAD": str(few_threads), "MOST_THREADS": str(most)}
    process = start(str(directory), environment=environment, ready=False)
    assert process.wait(60) == 1
    assert "Traceback" not in process.output.text
    (line,) = (line for line in process.output.lines if capture(line))
    assert line == process.output.lines[-1]
    said = rf"Error: cannot start \d+ threads, only {most}: raise the limit on processes and threads .*"
    assert re.fullmatch(said, line), line
    found = command("check", str(directory), **environment)
    assert (found.returncode, found.stderr.splitlines()[-1:]) == (1, [line])
