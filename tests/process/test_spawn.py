"""Command lines and environments of a spawned runner, beyond the conformance cases 1-14."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tools.conformance import scripted_model
from scripts.tools.conformance.assertions import ALPHABET
from scripts.tools.host.lib import Client, F, G, Process, Request, free_port, write_decoys
from scripts.tools.models.store import Store, manifest_path
from tests.process.conftest import FAULTY, HOST, MAIN, RUNNER, SENTENCEPIECE, SpawnModel


async def answer(process: Process) -> str:
    async with Client.of(process) as client:
        return (await client.complete(Request("Hi"))).text


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--mlx-engine", "--model", "{m}", "--port", "{p}"], id="without_runner"),
        pytest.param(["--port", "{p}", "--model", "{m}", "--cache", "none"], id="bare"),
    ],
)
async def test_flags_that_hosts_pass_are_optional_for_people(words: list[str], models_dir: Path) -> None:
    port = free_port()
    argv = [*RUNNER, *(word.format(m=MAIN, p=port) for word in words)]
    with Process(argv, port, HOST, {**os.environ, "OLLAMA_MODELS": str(models_dir)}) as process:
        await asyncio.to_thread(process.wait_ready, 60)
        assert await answer(process) == ALPHABET


@pytest.mark.parametrize(
    "words",
    [
        ["--nonsense"],
        ["--model", MAIN, "--port", "zero"],
        ["--port", "70000", "--model", MAIN],
        ["--model", MAIN, "--cache", "huge"],
        ["--model", MAIN, "--prefill-chunk", "0"],
        ["--port", "1"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_status_2(words: list[str]) -> None:
    with Process([*RUNNER, "runner", "--mlx-engine", *words], 1) as process:
        assert process.wait(20) == 2
        assert len(process.output.lines) == 1
        assert process.output.captured.startswith("Error: ")


def test_a_wrong_environment_variable_is_named(start: SpawnModel) -> None:
    process = start(environment={"MLX_RUNNER_CACHE": "huge"}, ready=False)
    assert process.wait(20) == 2
    assert "MLX_RUNNER_CACHE=huge" in process.output.captured


@pytest.fixture
def broken(models_dir: Path, tmp_path: Path) -> Store:
    """A copy of the sentencepiece model's manifest under a name that the test may break; blobs are shared."""
    source = Store(models_dir, manifest_path(models_dir, SENTENCEPIECE))
    store = Store(models_dir, manifest_path(models_dir, f"{tmp_path.name}:broken"))
    store.manifest = source.manifest
    return store


def name_of(store: Store) -> str:
    return f"{store.manifest_path.parent.name}:{store.manifest_path.name}"


@pytest.mark.parametrize("layer", ["tokenizer.json", "config.json", "model.norm.weight"])
def test_a_missing_file_or_tensor_is_one_fatal_line_that_names_it(layer: str, broken: Store, start: SpawnModel) -> None:
    broken.drop(layer)
    process = start(name_of(broken), ready=False)
    assert process.wait(20) == 1
    captured = process.output.captured
    assert captured.startswith("Error: ")
    assert "\n" not in captured
    assert layer in captured
    assert "Traceback" not in process.output.text


async def test_a_negative_debug_level_shows_warnings_only(start: SpawnModel) -> None:
    process = start(environment={"OLLAMA_DEBUG": "-1"})
    assert await answer(process) == ALPHABET
    async with Client.of(process) as client, asyncio.timeout(5):
        await client.send("POST", "/v1/status")
        while "level=" not in process.output.text:
            await asyncio.sleep(0.01)
    assert set(re.findall(r"level=([A-Z]+)", process.output.text)) == {"WARN"}


def test_every_line_of_a_session_is_a_slog_line(shared: Process) -> None:
    slog = re.compile(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|[+-]\d\d:\d\d) level=[A-Z]+ source=[\w.]+:\d+"
        r'( [\w.]+=("(\\.|[^"\\])*"|[^\s"=]+))+'
    )
    assert shared.output.lines
    for line in shared.output.lines:
        assert slog.fullmatch(line), line


async def test_a_hosts_libraries_do_not_shadow_ours(tmp_path: Path, start: SpawnModel) -> None:
    libraries = write_decoys(tmp_path / "lib" / "ollama")
    process = start(libraries=libraries)
    assert await answer(process) == ALPHABET


def test_the_decoy_libraries_would_break_an_import_of_mlx(tmp_path: Path) -> None:
    """Guards `test_a_hosts_libraries_do_not_shadow_ours`."""
    libraries = write_decoys(tmp_path / "lib" / "ollama")
    poisoned = {**os.environ, "LD_LIBRARY_PATH": str(libraries / "mlx_cuda_v13")}
    words = [sys.executable, "-c", "import mlx.core"]
    naked = subprocess.run(words, env=poisoned, capture_output=True, timeout=60, check=False)
    assert naked.returncode != 0


async def test_flags_beat_environment_variables(start: SpawnModel) -> None:
    process = start(arguments=["--cache", "none"], environment={"MLX_RUNNER_CACHE": "single"})
    assert "cache=none" in process.output.text
    process = start(environment={"MLX_RUNNER_CACHE": "none", "MLX_RUNNER_PREFILL_CHUNK": "7"}, generation=G)
    assert "cache=none" in process.output.text
    assert await answer(process) == ALPHABET


async def test_a_directory_serves_like_a_store(tmp_path: Path, start: SpawnModel) -> None:
    process = start(str(scripted_model.write_main(tmp_path / "model")), generation=F)
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
    assert process.wait(8) == 1, "reading takes ten seconds"
    assert process.output.captured.startswith("Error: parse tokenizer: tokenizer.json: ")
