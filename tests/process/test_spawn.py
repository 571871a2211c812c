"""Command lines and environments of a spawned runner, beyond the conformance cases 1-14."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from scripts.tools.conformance import scripted_model
from scripts.tools.conformance.assertions import ALPHABET
from scripts.tools.host.lib import Client, Process, Request, free_port, write_decoys
from scripts.tools.models.store import Store, manifest_path
from tests.process.conftest import FAULTY, HOST, MAIN, RUNNER, SENTENCEPIECE, SpawnModel


async def answer(process: Process) -> str:
    async with Client.of(process) as client:
        return (await client.complete(Request("Hi"))).text


async def test_flags_that_hosts_pass_are_optional_for_people(models_dir: Path) -> None:
    port = free_port()
    argv = [*RUNNER, "--port", str(port), "--model", MAIN, "--cache", "none"]
    with Process(argv, port, HOST, {**os.environ, "OLLAMA_MODELS": str(models_dir)}) as process:
        await asyncio.to_thread(process.wait_ready, 60)
        assert await answer(process) == ALPHABET


@pytest.mark.parametrize("words", [["--nonsense"], ["--port", "1"]])
def test_wrong_usage_is_one_line_and_exit_status_2(words: list[str]) -> None:
    with Process([*RUNNER, "runner", "--mlx-engine", *words], 1) as process:
        assert process.wait(60) == 2
        assert len(process.output.lines) == 1
        assert process.output.captured.startswith("Error: ")


@pytest.fixture
def broken(models_dir: Path, tmp_path: Path) -> Store:
    """A copy of the sentencepiece model's manifest under a name that the test may break; blobs are shared."""
    source = Store(models_dir, manifest_path(models_dir, SENTENCEPIECE))
    store = Store(models_dir, manifest_path(models_dir, f"{tmp_path.name}:broken"))
    store.manifest = source.manifest
    return store


def name_of(store: Store) -> str:
    return f"{store.manifest_path.parent.name}:{store.manifest_path.name}"


async def test_a_hosts_libraries_do_not_shadow_ours(tmp_path: Path, start: SpawnModel) -> None:
    libraries = write_decoys(tmp_path / "lib" / "ollama")
    process = start(libraries=libraries)
    assert await answer(process) == ALPHABET


async def test_a_directory_also_ends_at_the_token_that_its_tokenizer_calls_the_end(
    tmp_path: Path, start: SpawnModel
) -> None:
    """As in mlx-lm. From a store that token would be text, as in Ollama."""
    directory = scripted_model.write_main(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**config, "eos_token_id": [scripted_model.token("<|stop|>")]}))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|end|>"}))
    assert await answer(start(str(directory))) == ALPHABET


def test_a_broken_tokenizer_is_reported_before_the_weights_are_read(broken: Store, start: SpawnModel) -> None:
    broken.put_json("tokenizer.json", {"model": {"type": "BPE"}})
    process = start(name_of(broken), executable=FAULTY, environment={"FAULT": "slow-load"}, ready=False)
    assert process.wait(60) == 1
    assert "model loaded" not in process.output.text, "reading takes ten seconds"
    assert process.output.captured.startswith("Error: parse tokenizer: tokenizer.json: ")
