"""Conformance cases 1-8, 13, 14 and what a command line and an environment may do to a spawned runner."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.host import Client, F, G, LoadError, Process, Request, capture, free_port, write_decoys
from tests.models.store import Store, manifest_path
from tests.process.conftest import FAULTY, MAIN, RUNNER, SENTENCEPIECE, SpawnModel

ALPHABET = "jklmnopqrstuvwxyz"


async def answer(process: Process) -> str:
    async with Client.of(process) as client:
        return (await client.complete(Request("Hi"))).text


def listening_addresses(port: int) -> set[str]:
    """The local addresses, in the kernel's hexadecimal, on which somebody listens on `port`."""
    addresses = set()
    for table in ("tcp", "tcp6"):
        for row in Path("/proc/net", table).read_text().splitlines()[1:]:
            address, _, number = row.split()[1].rpartition(":")
            if row.split()[3] == "0A" and int(number, 16) == port:
                addresses.add(address)
    return addresses


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
async def test_case_01_listens_on_the_given_port_of_127_0_0_1_only(shared: Process) -> None:
    assert listening_addresses(shared.port) == {"0100007F"}
    assert await answer(shared) == ALPHABET


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["runner", "--mlx-engine", "--model", "{m}", "--port", "{p}", "--verbose"], id="case_02_verbose"),
        pytest.param(["runner", "--mlx-engine", "--model={m}", "--port={p}"], id="case_03_equals"),
        pytest.param(["runner", "--mlx-engine", "-model", "{m}", "-port={p}", "-verbose=true"], id="case_03_one_dash"),
        pytest.param(["runner", "--model", "{m}", "--port", "{p}"], id="generation_g"),
        pytest.param(["--mlx-engine", "--model", "{m}", "--port", "{p}"], id="without_runner"),
        pytest.param(["--port", "{p}", "--model", "{m}", "--cache", "none"], id="bare"),
    ],
)
async def test_every_spelling_of_the_command_line_serves(words: list[str], models_dir: Path) -> None:
    port = free_port()
    argv = [*RUNNER, *(word.format(m=MAIN, p=port) for word in words)]
    with Process(argv, port, environment={**os.environ, "OLLAMA_MODELS": str(models_dir)}) as process:
        await asyncio.to_thread(process.wait_ready, 60)
        assert await answer(process) == ALPHABET


@pytest.mark.parametrize(
    "words", [["runner", "--imagegen-engine"], ["runner", "--ollama-engine"], ["runner", "engine"]]
)
def test_case_04_another_engine_is_refused(words: list[str]) -> None:
    with Process([*RUNNER, *words, "--model", MAIN, "--port", "1"], 1) as process:
        assert process.wait(20) not in (None, 0)
        assert process.output.captured == "Error: unknown runner engine, expected --mlx-engine"


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


def test_case_05_a_missing_model_is_told_as_the_host_tells_it(start: SpawnModel) -> None:
    process = start("nobody/nothing:v1", ready=False)
    with pytest.raises(
        LoadError, match=r"^mlx runner failed: Error: read manifest: .*\(exit: exit status 1\)$"
    ) as told:
        process.wait_ready(20)
    assert "nothing" in str(told.value)
    assert [line for line in process.output.lines if capture(line)] == [process.output.captured]


@pytest.fixture
def broken(models_dir: Path, tmp_path: Path) -> Store:
    """A copy of the sentencepiece model's manifest under a name that the test may break; blobs are shared."""
    source = Store(models_dir, manifest_path(models_dir, SENTENCEPIECE))
    store = Store(models_dir, manifest_path(models_dir, f"{tmp_path.name}:broken"))
    store.manifest = source.manifest
    return store


def name_of(store: Store) -> str:
    return f"{store.manifest_path.parent.name}:{store.manifest_path.name}"


def test_case_06_an_unsupported_architecture_is_named(broken: Store, start: SpawnModel) -> None:
    config = json.loads(broken.blob_of("config.json").read_text())
    broken.put_json("config.json", {**config, "architectures": ["HAL9000ForCausalLM"], "model_type": "hal9000"})
    process = start(name_of(broken), ready=False)
    assert process.wait(20) == 1
    assert process.output.captured == "Error: unsupported architecture: HAL9000ForCausalLM"


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


def test_case_07_a_taken_port_is_told_at_once(start: SpawnModel) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = start(port=port, ready=False)
        assert process.wait(20) == 1
    assert process.output.captured == f"Error: listen tcp 127.0.0.1:{port}: bind: address already in use"


def test_case_08_nothing_but_refusal_or_503_until_it_is_ready(start: SpawnModel) -> None:
    process = start(ready=False)
    seen = []
    deadline = time.monotonic() + 60
    while "200" not in seen and time.monotonic() < deadline and process.exit_status is None:
        try:
            with socket.create_connection(("127.0.0.1", process.port), timeout=2) as connection:
                connection.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
                seen.append(connection.recv(4096).decode().split()[1])
        except ConnectionRefusedError:
            seen.append("refused")
        time.sleep(0.005)
    assert seen[0] == "refused"
    assert seen[-1] == "200"
    assert set(seen) <= {"refused", "503", "200"}
    assert "listening" in process.output.text


@pytest.mark.parametrize("spelling", ['"{}" ', " '{}'", '""{}""\n'])
async def test_case_13_quotes_and_spaces_around_ollama_models_are_stripped(
    spelling: str, models_dir: Path, start: SpawnModel
) -> None:
    assert await answer(start(SENTENCEPIECE, models_dir=spelling.format(models_dir))) == ""


@pytest.mark.parametrize(
    ("debug", "wanted", "unwanted"),
    [
        (None, {"INFO"}, {"DEBUG", "TRACE"}),
        ("0", {"INFO"}, {"DEBUG", "TRACE"}),
        ("1", {"INFO", "DEBUG"}, {"TRACE"}),
        ("2", {"INFO", "DEBUG", "TRACE"}, set()),
        ("-1", set(), {"INFO", "DEBUG", "TRACE"}),
    ],
)
async def test_case_14_ollama_debug_sets_the_level(
    debug: str | None, wanted: set[str], unwanted: set[str], start: SpawnModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLLAMA_DEBUG", raising=False)
    process = start(environment={} if debug is None else {"OLLAMA_DEBUG": debug})
    await answer(process)
    async with Client.of(process) as client:
        await client.send("POST", "/v1/status")  # a warning at every level: once it is there, so are the others
    async with asyncio.timeout(5):
        while "level=WARN" not in process.output.text:
            await asyncio.sleep(0.01)
    levels = set(re.findall(r"^time=\S+ level=([A-Z]+) source=\S+:\d+ msg=", process.output.text, re.MULTILINE))
    assert levels >= wanted
    assert not levels & unwanted


def test_every_line_of_a_session_is_a_slog_line(shared: Process) -> None:
    slog = re.compile(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|[+-]\d\d:\d\d) level=[A-Z]+ source=[\w.]+:\d+"
        r'( [\w.]+=("(\\.|[^"\\])*"|[^\s"=]+))+'
    )
    assert shared.output.lines
    for line in shared.output.lines:
        assert slog.fullmatch(line), line


async def test_a_hosts_own_libraries_do_not_get_in_front_of_ours(tmp_path: Path, start: SpawnModel) -> None:
    libraries = write_decoys(tmp_path / "lib" / "ollama")
    process = start(libraries=libraries)
    assert await answer(process) == ALPHABET


def test_the_decoy_libraries_would_break_an_import_of_mlx(tmp_path: Path) -> None:
    """Else the test above proves nothing."""
    libraries = write_decoys(tmp_path / "lib" / "ollama")
    poisoned = {**os.environ, "LD_LIBRARY_PATH": str(libraries / "mlx_cuda_v13")}
    naked = subprocess.run([sys.executable, "-c", "import mlx.core"], env=poisoned, capture_output=True, check=False)
    assert naked.returncode != 0


async def test_flags_beat_environment_variables(start: SpawnModel) -> None:
    process = start(arguments=["--cache", "none"], environment={"MLX_RUNNER_CACHE": "single"})
    assert "cache=none" in process.output.text
    process = start(environment={"MLX_RUNNER_CACHE": "none", "MLX_RUNNER_PREFILL_CHUNK": "7"}, generation=G)
    assert "cache=none" in process.output.text
    assert await answer(process) == ALPHABET


async def test_a_directory_serves_like_a_store(tmp_path: Path, start: SpawnModel) -> None:
    from tests.process import script

    process = start(str(script.write_main(tmp_path / "model")), generation=F)
    assert await answer(process) == ALPHABET


async def test_a_directory_also_ends_at_the_token_that_its_tokenizer_calls_the_end(
    tmp_path: Path, start: SpawnModel
) -> None:
    """As mlx-lm has it. From a store that token would be text, as Ollama has it."""
    from tests.process import script

    directory = script.write_main(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**config, "eos_token_id": [script.token("<|stop|>")]}))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|end|>"}))
    assert await answer(start(str(directory))) == ALPHABET


def test_a_broken_tokenizer_is_told_before_the_weights_are_read(broken: Store, start: SpawnModel) -> None:
    broken.put_json("tokenizer.json", {"model": {"type": "BPE"}})
    process = start(name_of(broken), executable=FAULTY, environment={"FAULT": "slow-load"}, ready=False)
    assert process.wait(8) == 1, "reading takes ten seconds"
    assert process.output.captured.startswith("Error: parse tokenizer: tokenizer.json: ")
