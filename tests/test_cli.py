"""Flags, environment and defaults, in the spellings of hosts and of people."""

import logging
from pathlib import Path

import pytest

from runner import logs
from runner.cli import parse
from runner.errors import UsageError
from runner.flags import FLAGS

HOST_CALL = ["runner", "--mlx-engine", "--model", "m:latest", "--port", "41000"]


@pytest.mark.parametrize(
    "argv",
    [
        HOST_CALL,
        [*HOST_CALL, "--verbose"],
        [*HOST_CALL, "--verbose=true"],
        ["runner", "--model", "m:latest", "--port", "41000"],
        ["--mlx-engine", "--model", "m:latest", "--port", "41000"],
        ["--model=m:latest", "--port=41000"],
        ["-model", "m:latest", "-port", "41000"],
        ["runner", "--mlx-engine", "-model=m:latest", "-port=41000", "-verbose"],
    ],
)
def test_every_spelling_of_a_host_is_understood(argv: list[str]) -> None:
    settings = parse(argv, {})
    assert (settings.model, settings.port) == ("m:latest", 41000)


@pytest.mark.parametrize("word", ["--imagegen-engine", "--ollama-engine", "llama"])
def test_another_engine_is_refused_in_ollamas_words(word: str) -> None:
    with pytest.raises(UsageError, match=r"^unknown runner engine, expected --mlx-engine$"):
        parse(["runner", word, "--model", "m", "--port", "1"], {})


def test_only_a_process_started_by_a_host_watches_its_parent() -> None:
    assert parse(HOST_CALL, {}).watch_parent
    assert not parse(HOST_CALL[2:], {}).watch_parent
    assert parse([*HOST_CALL[2:], "--watch-parent", "on"], {}).watch_parent
    assert not parse(HOST_CALL, {"MLX_RUNNER_WATCH_PARENT": "off"}).watch_parent


def test_a_flag_beats_its_variable_and_that_the_default() -> None:
    argv = ["--model", "m"]
    assert parse(argv, {}).prefill_chunk_tokens == 2048
    assert parse(argv, {"MLX_RUNNER_PREFILL_CHUNK": "64"}).prefill_chunk_tokens == 64
    assert parse([*argv, "--prefill-chunk", "32"], {"MLX_RUNNER_PREFILL_CHUNK": "64"}).prefill_chunk_tokens == 32


def test_every_flag_has_its_variable() -> None:
    examples = {
        "model": "x",
        "models-dir": "/m",
        "port": "9",
        "watch-parent": "on",
        "log-level": "debug",
        "cache": "none",
        "prefill-chunk": "8",
        "blas": "off",
        "blas-threads": "2",
    }
    assert set(examples) == {flag.name for flag in FLAGS if not flag.is_switch}
    by_variable = parse([], {flag.variable: examples[flag.name] for flag in FLAGS if not flag.is_switch})
    by_flag = parse([word for name, value in examples.items() for word in (f"--{name}", value)], {})
    assert by_variable == by_flag


@pytest.mark.parametrize(
    ("value", "directory"),
    [
        ("/x/models", "/x/models"),
        (' "/x/models" ', "/x/models"),
        ("'/x/models'", "/x/models"),
        ("", "/home/u/.ollama/models"),
        ("  ", "/home/u/.ollama/models"),
    ],
)
def test_ollama_models_is_stripped_of_blanks_and_quotes(value: str, directory: str) -> None:
    settings = parse(["--model", "m"], {"OLLAMA_MODELS": value, "HOME": "/home/u"})
    assert settings.models_dir == Path(directory)


def test_the_log_level_is_ollamas_unless_it_is_given() -> None:
    argv = ["--model", "m"]
    assert parse(argv, {}).log_level == logging.INFO
    assert parse(argv, {"OLLAMA_DEBUG": "1"}).log_level == logging.DEBUG
    assert parse(argv, {"OLLAMA_DEBUG": "2"}).log_level == logs.TRACE
    assert parse([*argv, "--log-level", "warn"], {"OLLAMA_DEBUG": "2"}).log_level == logging.WARNING


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        ([], {}, "--model is missing"),
        (["--model", "m", "--port", "x"], {}, "--port x: a whole number from 0 to 65535"),
        (["--model", "m", "--port", "70000"], {}, "--port 70000"),
        (["--model", "m", "--nonsense"], {}, "unrecognized arguments: --nonsense"),
        (["--model", "m", "--cach", "none"], {}, "unrecognized arguments"),
        (["--model", "m", "--cache", "huge"], {}, "invalid choice: 'huge'"),
        (["--model", "m"], {"MLX_RUNNER_CACHE": "huge"}, "MLX_RUNNER_CACHE=huge: choose one of"),
        (["--model", "m", "--prefill-chunk", "0"], {}, "--prefill-chunk 0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(argv: list[str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        parse(argv, environ)
