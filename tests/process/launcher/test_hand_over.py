"""Ollama's own runner in place of ours, for what ours refuses or cannot read. The stand-in is host and runner."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.cli.parse import parse_check
from runner.commands.check.inspection import inspect
from runner.ollama.plan import find_media
from scripts.tools.host.lib import free_port
from scripts.tools.models.sources import Published
from scripts.tools.models.store import MANIFEST, Store, write_list, write_store
from tests.process.launcher.standin import (
    COMMAND,
    WAIT_S,
    Host,
    Installation,
    Spawned,
    environment,
    eventually_gone,
    parse,
)
from tests.process.launcher.test_launch import directory_of, less_shell

NAME = "seeing:latest"
OWN = ("runner", "--ollama-engine", "--port", "50004")
"""The stand-in's arguments for a GGUF runner: this one gets exactly what a host gives its runners."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def store(sources: Published, tmp_path: Path) -> Store:
    """A Qwen 3.5 with a vision tower that config.json hardly describes."""
    return write_store(tmp_path / "models", NAME, sources("qwen3.5"))


@pytest.fixture
def seeing(sources: Published, tmp_path: Path) -> Store:
    """A Qwen 3.5 that sees."""
    return write_store(tmp_path / "models", NAME, sources("qwen3.5-seeing"))


@pytest.fixture
def hearing(sources: Published, installation: Installation, tmp_path: Path) -> Store:
    """A Gemma 4 that sees, and an Ollama in which it hears, too."""
    content = installation.ollama.read_bytes()
    installation.ollama.write_bytes(content.replace(b"ollama/x/models/qwen3_5.", b"ollama./x/models/gemma4."))
    assert find_media(installation.ollama) == ["gemma4"]
    return write_store(tmp_path / "models", NAME, sources("gemma4-hearing"))


@pytest.fixture
def library(installation: Installation) -> Path:
    """Of Ollama's runner: one that can be loaded."""
    path = installation.libraries / "mlx_cuda_v13" / "libmlxc.so"
    subprocess.run(["cc", "-x", "c", "-shared", "-fPIC", "-o", str(path), "/dev/null"], check=True)
    return path


def config_of(store: Store) -> dict[str, object]:
    return dict(json.loads(store.blob_of("config.json").read_bytes()))


def unknown(store: Store) -> None:
    store.put_json("config.json", config_of(store) | {"architectures": ["OddForCausalLM"], "model_type": "odd"})


def lacking(store: Store) -> None:
    """Seen when the module is built, on the engine's thread."""
    store.drop("model.language_model.layers.0.mlp.down_proj.weight")


def without_tokenizer(store: Store) -> None:
    """Seen on a helper thread."""
    store.put("tokenizer.json", b'{"model": {"type": "Odd"}}')


def blind(store: Store) -> None:
    """A tower without a config: Ollama's runner would not load it."""
    store.put_json("config.json", {key: value for key, value in config_of(store).items() if key != "vision_config"})


def text_only(store: Store) -> None:
    """A config without a tower: neither would it load this."""
    for layer in store.layers:
        if str(layer.get("name")).startswith("model.visual."):
            store.drop(str(layer["name"]))


def without_positions(store: Store) -> None:
    change_vision(store, num_position_embeddings=None)


def without_a_norm(store: Store) -> None:
    store.drop("model.visual.merger.norm.weight")


def in_a_list(store: Store) -> None:
    """The tag is as hosts from 0.40 leave it."""
    other = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": []}
    write_list(store.models_dir, NAME, [("llamacpp", other), ("mlx", store.manifest)])
    shutil.rmtree(store.models_dir / "manifests")


def change_vision(store: Store, **changes: object) -> None:
    config = config_of(store)
    vision = config["vision_config"]
    assert isinstance(vision, dict)
    store.put_json("config.json", config | {"vision_config": {**vision, **changes}})


Serve = Callable[..., Host]


@pytest.fixture
def serve(installation: Installation, tmp_path: Path, library: Path) -> Serve:
    """Starts a host of the models of a store, with these variables."""

    def started(store: Store, **variables: str) -> Host:
        environ = environment(tmp_path, OLLAMA_MODELS=str(store.models_dir), LD_LIBRARY_PATH="/a b", **variables)
        return Host([*COMMAND, str(installation.ollama)], environ, tmp_path)

    return started


def words() -> tuple[str, ...]:
    return "runner", "--mlx-engine", "--model", NAME, "--port", str(free_port())


def told(spawned: Spawned, what: str) -> bytes:
    """The one line about it."""
    (line,) = [line for line in spawned.output.splitlines() if what.encode() in line]
    return line


def check_taken_over(host: Host) -> Spawned:
    """Ollama's own runner in the same process, as if there had never been another."""
    given = words()
    spawned, own = host.spawn(*given), host.spawn(*OWN).report
    report = spawned.report
    assert spawned.status == 0
    assert report.pid == spawned.pid
    assert report.executable == host.report.argv[0]
    assert report.argv == [host.report.argv[0], *given]
    assert less_shell(report.environment) == less_shell(own.environment)
    assert (report.cwd, report.ignored) == (own.cwd, own.ignored)
    assert b"rror" not in spawned.output, "hosts look for that word"
    return spawned


def refused(host: Host) -> Spawned:
    """Our runner, which ends with an error in place of an answer."""
    spawned = host.spawn(*words())
    assert (spawned.status, spawned.reports) == (1, [])
    return spawned


def served_here(host: Host) -> list[str]:
    """The lines until our runner listens; it is ended then."""
    pid = host.begin(words())
    lines = [host.line().decode()]
    while "msg=listening" not in lines[-1]:
        lines.append(host.line().decode())
        assert not lines[-1].startswith(("report ", "ended ")), lines
    os.kill(pid, signal.SIGINT)
    while not host.line().startswith(b"ended "):
        pass
    return lines


@pytest.mark.parametrize("fault", [unknown, lacking, without_tokenizer])
def test_models_that_ours_refuses_are_taken_over(serve: Serve, store: Store, fault: type) -> None:
    text_only(store)
    fault(store)
    in_a_list(store)
    for mode in ("auto", "refused"):
        with serve(store, MLX_RUNNER_HAND_OVER=mode) as running:
            line = told(check_taken_over(running), "handing over")
        (problem, *_) = inspect(parse_check([NAME, "--models-dir", str(store.models_dir)], {})).problems
        why = json.dumps(problem) if " " in problem else problem
        assert f"model={NAME} why={why} to_keep_it=".encode() in line
        assert b'"MLX_RUNNER_HAND_OVER=off ' in line


def test_nothing_is_taken_over_that_is_to_stay(serve: Serve, store: Store) -> None:
    unknown(store)
    with serve(store, MLX_RUNNER_HAND_OVER="off") as running:
        spawned = refused(running)
    assert spawned.output.splitlines()[-1] == b"Error: unsupported architecture: OddForCausalLM"


def test_where_ollamas_runner_cannot_compute_ours_tells_its_own_error(
    serve: Serve, store: Store, library: Path
) -> None:
    unknown(store)
    library.write_bytes(b"for another machine")
    with serve(store) as running:
        spawned = refused(running)
    assert b"unsupported architecture: OddForCausalLM" in told(spawned, "not handed over")
    assert spawned.output.splitlines()[-1] == b"Error: unsupported architecture: OddForCausalLM"


def test_damage_found_only_by_reading_is_reported(serve: Serve, store: Store) -> None:
    """With --verify, a blob that differs must not be served by another runner."""
    text_only(store)
    blob = store.blob_of("model.language_model.embed_tokens.weight")
    blob.write_bytes(blob.read_bytes()[:-4] + b"\1\2\3\4")
    with serve(store, MLX_RUNNER_VERIFY="on") as running:
        spawned = refused(running)
    assert spawned.output.splitlines()[-1].startswith(b"Error: digest mismatch")


def test_a_tower_that_only_ollamas_runner_may_load_is_taken_over(serve: Serve, seeing: Store) -> None:
    change_vision(seeing, depth=1)  # the tower has another block, which Ollama's runner leaves out
    with serve(seeing) as running:
        line = told(check_taken_over(running), "handing over")
    assert b'why="it takes pictures, which this runner cannot read: the qwen3.5 tower has blocks.1.' in line
    assert b'to_keep_it="MLX_RUNNER_HAND_OVER=refused serves its text here"' in line
    with serve(seeing, MLX_RUNNER_HAND_OVER="refused") as running:
        assert not any("hand" in line for line in served_here(running))


@pytest.mark.parametrize("fault", [blind, text_only, without_positions, without_a_norm])
def test_a_model_whose_tower_no_runner_could_load_is_kept_as_text(serve: Serve, seeing: Store, fault: type) -> None:
    fault(seeing)
    in_a_list(seeing)
    with serve(seeing) as running:
        lines = served_here(running)
    assert not any("hand" in line or "mlx was imported first" in line for line in lines)
    (line,) = [line for line in lines if "tower" in line or "pictures" in line]
    assert 'msg="the model sees no pictures" why=' in line


def test_a_model_that_hears_is_served_here(serve: Serve, hearing: Store) -> None:
    with serve(hearing) as running:
        lines = served_here(running)
    assert not any("hand" in line or "mlx was imported first" in line for line in lines)
    assert any("the model sees pictures" in line for line in lines)
    assert any("the model hears" in line for line in lines)


def test_a_tower_for_sound_that_only_ollamas_runner_may_load_is_taken_over(serve: Serve, hearing: Store) -> None:
    config = config_of(hearing)
    audio = config["audio_config"]
    assert isinstance(audio, dict)
    hearing.put_json("config.json", config | {"audio_config": audio | {"hidden_act": "gelu"}})
    with serve(hearing) as running:
        line = told(check_taken_over(running), "handing over")
    assert b'why="it takes sound, which this runner cannot read: config.json: hidden_act: want' in line


def test_the_private_directory_stays_while_the_taken_over_runner_lives(
    serve: Serve, store: Store, tmp_path: Path
) -> None:
    unknown(store)
    with serve(store, STANDIN_LINGER="1", MLX_RUNNER_WATCH_PARENT="off") as running:
        pid = begin(running)
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) == 4, "the three streams and the lock; no port, no model"
        assert children(pid) == []
        directory = directory_of(tmp_path)
        running.popen.kill()
        running.wait()
        assert directory.exists()
        os.kill(pid, signal.SIGKILL)
        assert eventually_gone(directory)


@pytest.mark.parametrize("first", ["host", "runner"])
def test_the_taken_over_runner_ends_with_its_host_and_nothing_is_left_of_either(
    serve: Serve, store: Store, first: str
) -> None:
    """Ollama's own runner does not watch its host. Nobody reads its pipe here: that is not what ends it."""
    unknown(store)
    with serve(store, STANDIN_LINGER="10") as running:
        pid = begin(running)
        (watcher,) = children(pid)
        assert not has_ended(pid)
        if first == "runner":
            os.kill(pid, signal.SIGKILL)
            assert running.line() == b"ended -9"
        else:
            running.popen.kill()
            running.wait()
        assert eventually(lambda: has_ended(pid) and has_ended(watcher))
        assert (running.popen.poll() is None) == (first == "runner")


def begin(host: Host) -> int:
    """Starts a runner that is taken over. Returns its process id."""
    pid = host.begin(words())
    while not (line := host.line()).startswith(b"report "):
        pass
    assert parse(line).pid == pid
    return pid


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def eventually(reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
