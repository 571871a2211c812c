"""Command lines and environments of a spawned runner, beyond the conformance cases 1-14."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from scripts.tools.conformance import scripted_model
from scripts.tools.conformance.assertions import ALPHABET
from scripts.tools.host.lib import Client, Process, Request, StatusError, free_port, write_decoys
from scripts.tools.models.store import Store, manifest_path
from tests.process.conftest import FAULTY, HOST, MAIN, RUNNER, SENTENCEPIECE, SpawnModel
from tests.process.faults.fault_control import FaultControl


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


async def test_a_hosts_libraries_do_not_shadow_ours(tmp_path: Path, start: SpawnModel) -> None:
    process = start(libraries=write_decoys(tmp_path / "lib" / "ollama"))
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


def test_a_broken_tokenizer_is_reported_before_the_weights_are_read(
    models_dir: Path, tmp_path: Path, start: SpawnModel
) -> None:
    """The manifest is a copy of the sentencepiece model's; blobs are shared."""
    name, faults = f"{tmp_path.name}:broken", FaultControl(tmp_path)
    store = Store(models_dir, manifest_path(models_dir, name))
    store.manifest = Store(models_dir, manifest_path(models_dir, SENTENCEPIECE)).manifest
    store.put_json("tokenizer.json", {"model": {"type": "BPE"}})
    faults.hold("load")
    process = start(name, executable=FAULTY, environment=faults.environment, ready=False)
    assert process.wait(60) == 1
    assert "model loaded" not in process.output.text
    assert process.output.captured.startswith("Error: parse tokenizer: tokenizer.json: ")


async def test_a_shorter_context_is_reported_and_enforced(start: SpawnModel) -> None:
    """A prompt that fills it is refused, and one a token shorter gets one token."""
    shorter = start(arguments=["--context", "100"])
    assert "level=WARN" not in shorter.output.text
    for process, tokens in ((shorter, 100), (start(environment={"MLX_RUNNER_CONTEXT": "50"}), 50)):
        async with Client.of(process) as client:
            assert (await client.status()).context_length == tokens
            told = rf"\({tokens} tokens\) exceeds .* context length \({tokens} tokens\)"
            with pytest.raises(StatusError, match=told):
                await client.complete(Request("p" * tokens))
            assert (await client.complete(Request("0" * (tokens - 1)))).text == "1"
