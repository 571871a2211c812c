"""The command line and the environment, made into frozen settings. Nothing else looks into either of them."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from runner import logs
from runner.cli.flags import CHECK_FLAGS, COMMANDS, FLAGS, MOST_PARALLEL, TOP_FLAGS
from runner.cli.values import Parser, values_of, version_text
from runner.errors import UsageError
from runner.process import parent
from runner.settings import DEFAULT_PARALLEL, CheckSettings, OllamaRunner, Settings, TopSettings
from runner.sizes import Bound, parse_bound

CHECK = "check"
"""The first word of `mlx-runner check`."""


def _completion(words: Sequence[str]) -> str:
    from runner.cli.completion import completion  # no server needs it

    return completion(words)


_PRINTED: dict[str, Callable[[Sequence[str]], str]] = {
    "completion": _completion,
    "version": lambda _: f"{version_text()}\n",
}
"""The first words after which something is printed, and no more."""
TOP = "top"
"""The first word of `mlx-runner top`."""

_ENGINE = "--mlx-engine"
_LEVELS = {
    "trace": logs.TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
_OLLAMA_KV_BITS = {"q8_0": 8, "q4_0": 4, "f16": None, "bf16": None, "f32": None, "": None}
_SERVICE_STORE = Path("/usr/share/ollama/.ollama/models")  # where Ollama's Linux installer puts it
_NO_MODEL = "name a model of the Ollama store or a directory"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from the words after the program's name. UsageError says what is wrong with them.

    Exits by itself after `--help` and `--version`, and after `completion` and `version`.
    """
    if argv[:1] and (text := _PRINTED.get(argv[0])):
        sys.stdout.write(text(argv[1:]))
        raise SystemExit(0)
    words, hosted = _without_host_words(argv)
    values = values_of(_parser(), FLAGS, words, environ)
    if not values.get("model"):
        raise UsageError(f"--model is missing: {_NO_MODEL}")
    kv_bits, kv_remarks = _kv_bits(values.get("kv-bits"), environ)
    parallel, parallel_remarks = _parallel(values, environ)
    return Settings(
        model=values["model"],
        port=_whole(values, "port", 0, 65535),
        models_dir=_models_dir(values.get("models-dir"), environ),
        context_tokens=_context(values),
        verify=values["verify"] == "on",
        dtype=values["dtype"],
        one_core=values["one-core"] == "auto",
        trace=Path(values["trace"]) if "trace" in values else None,
        memory=_bound(values, "memory"),
        cache=values["cache"],
        cache_memory=_bound(values, "cache-memory"),
        kv_bits=kv_bits,
        parallel=parallel,
        max_gap_s=_whole(values, "max-gap-ms", 1, 60_000) / 1000,
        prefill_chunk_tokens=_whole(values, "prefill-chunk", 1, 1 << 20) if "prefill-chunk" in values else None,
        blas=values["blas"],
        blas_threads=_whole(values, "blas-threads", 1, 1024),
        log_level=_log_level(values, environ),
        inspect_text=values["inspect-text"] == "on",
        watch_parent=values.get("watch-parent", "on" if hosted else "off") == "on",
        hosted=hosted,
        hand_over=values["hand-over"],
        ollama=_ollama(argv, environ) if hosted else None,
        remarks=(*kv_remarks, *parallel_remarks),
    )


def parse_check(words: Sequence[str], environ: Mapping[str, str]) -> CheckSettings:
    """Settings from the words after `check`; the rest as `parse`."""
    values = values_of(_check_parser(), CHECK_FLAGS, words, environ)
    model = values.get("model") or environ.get("MLX_RUNNER_MODEL", "").strip()
    if not model:
        raise UsageError(f"{_NO_MODEL}: mlx-runner check NAME|DIR")
    return CheckSettings(
        model=model,
        models_dir=_models_dir(values.get("models-dir"), environ),
        context_tokens=_context(values),
        verify=values["verify"] == "on",
        dtype=values["dtype"],
        memory=_bound(values, "memory"),
        blas=values["blas"],
        blas_threads=_whole(values, "blas-threads", 1, 1024),
        json=values["json"] == "on",
        log_level=_log_level(values, environ),
    )


def parse_top(words: Sequence[str], environ: Mapping[str, str]) -> TopSettings:
    """Settings from the words after `top`; the rest as `parse`."""
    values = values_of(_top_parser(), TOP_FLAGS, words, environ)
    return TopSettings(url=_url(values), once=values["once"] == "on", log_level=_log_level(values, environ))


def _url(values: Mapping[str, str]) -> str:
    """Of a runner, from `URL`, which may be a mere port too, or from `--port`."""
    given = values.get("url", "")
    if not given and "port" not in values:
        raise UsageError("say which runner: mlx-runner top --port N; its log tells the port (`listening url=...`)")
    if not given or given.isdecimal():
        return f"http://127.0.0.1:{_whole({'port': given or values['port']}, 'port', 1, 65535)}"
    try:
        parts = urlsplit(given if "//" in given else f"http://{given}")
        good = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{given}: the address of a runner looks like http://127.0.0.1:11500")
    return f"http://{parts.netloc}"


def _without_host_words(argv: Sequence[str]) -> tuple[list[str], bool]:
    """`argv` without the words by which a host says what it starts, and whether they were there."""
    words = list(argv)
    hosted = words[:1] == ["runner"]
    if hosted:
        del words[0]
        if words and (words[0].endswith("-engine") or not words[0].startswith("-")) and words[0] != _ENGINE:
            raise UsageError(f"unknown runner engine, expected {_ENGINE}")
    if words[:1] == [_ENGINE]:
        del words[0]
    return words, hosted


def _ollama(argv: Sequence[str], environ: Mapping[str, str]) -> OllamaRunner | None:
    """What scripts/ollama-serve tells of Ollama's own runner; None if it has not started this one."""
    executable = environ.get(parent.OLLAMA)
    if not executable:
        return None
    libraries = environ.get(f"{parent.OLLAMA}_LIBRARIES")
    return OllamaRunner(
        command=(executable, *argv),
        environ=parent.with_host_libraries(environ),
        libraries=Path(libraries) if libraries else None,
        media=frozenset(environ.get(f"{parent.OLLAMA}_MEDIA", "").split()),
    )


def _parser() -> Parser:
    parser = Parser(
        prog="mlx-runner",
        usage="mlx-runner --model NAME|DIR [--port N] [flags]\n       mlx-runner COMMAND ...",
        description="Serves one MLX model to an Ollama host, or to curl, on 127.0.0.1.",
        epilog="Defaults stand in brackets. Every flag can also be given as an environment variable: --kv-bits is"
        " MLX_RUNNER_KV_BITS. README.md says more about each, docs/operating.md what to do when something is wrong.",
    )
    parser.add_commands(COMMANDS)
    parser.add_flags(FLAGS)
    return parser


def _check_parser() -> Parser:
    parser = Parser(
        prog="mlx-runner check",
        usage="mlx-runner check NAME|DIR [flags]",
        description="Reads the headers of a model, not its weights, and says what it is and everything that is wrong"
        " with it. Exit status 0: it would load; 1: it would not; 2: the command line is wrong.",
        epilog="The flags mean what they mean to `mlx-runner`, and have the same environment variables.",
    )
    parser.add_argument_group("what to check").add_argument(
        "model", nargs="?", metavar="NAME|DIR", help="a model of the Ollama store or a Hugging Face style directory"
    )
    parser.add_flags(CHECK_FLAGS)
    return parser


def _top_parser() -> Parser:
    parser = Parser(
        prog="mlx-runner top",
        usage="mlx-runner top [--port N | URL] [--once]",
        description="Shows what a runner does: requests, tokens, memory and its prefix cache, until Ctrl-C. Without a"
        " terminal it prints that once. The page at the same address shows more.",
        epilog="The flags have environment variables too: --port is MLX_RUNNER_PORT.",
    )
    parser.add_argument_group("where").add_argument(
        "url", nargs="?", metavar="URL", help="its address, such as http://127.0.0.1:11500, or its port alone"
    )
    parser.add_flags(TOP_FLAGS)
    return parser


def _log_level(values: Mapping[str, str], environ: Mapping[str, str]) -> int:
    given = values.get("log-level")
    return _LEVELS[given] if given else logs.level_from_ollama(environ.get("OLLAMA_DEBUG", ""))


def _context(values: Mapping[str, str]) -> int | None:
    """At least two tokens: one of a prompt, one of an answer."""
    return _whole(values, "context", 2, 1 << 30) if "context" in values else None


def _whole(values: Mapping[str, str], name: str, least: int, most: int) -> int:
    try:
        number = int(values[name])
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise UsageError(f"--{name} {values[name]}: a whole number from {least} to {most} is wanted")
    return number


def _bound(values: Mapping[str, str], name: str) -> Bound:
    try:
        return parse_bound(values[name])
    except ValueError as error:
        raise UsageError(
            f"--{name} {values[name]}: bytes (123456, 512MiB, 8G) or a share (25%) are wanted, or both, as 8G,25%"
        ) from error


def _kv_bits(given: str | None, environ: Mapping[str, str]) -> tuple[int | None, tuple[str, ...]]:
    """The bits, and what is to be said about them."""
    if given:
        return (None if given == "off" else int(given)), ()
    kind = environ.get("OLLAMA_KV_CACHE_TYPE", "").strip(" \t\"'").lower()
    if kind in _OLLAMA_KV_BITS:
        return _OLLAMA_KV_BITS[kind], ()
    # Not refused: the variable speaks to every runner of the host, and Ollama goes on unquantized too.
    known = ", ".join(filter(None, _OLLAMA_KV_BITS))
    return None, (f"OLLAMA_KV_CACHE_TYPE={kind} is none of {known}: keys and values stay unquantized",)


def _parallel(values: Mapping[str, str], environ: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """How many requests run at once, and what is to be said about it."""
    if "parallel" in values:
        return _whole(values, "parallel", 1, MOST_PARALLEL), ()
    wanted = environ.get("OLLAMA_NUM_PARALLEL", "").strip(" \t\"'")
    if not wanted.strip("0"):  # Ollama's own choice
        return DEFAULT_PARALLEL, ()
    # As with the kind of cache, nothing is refused.
    if not (wanted.isascii() and wanted.isdigit()):
        said = f"OLLAMA_NUM_PARALLEL={wanted} is no whole number: {DEFAULT_PARALLEL} requests run at once"
        return DEFAULT_PARALLEL, (said,)
    number = int(wanted) if len(wanted) < 20 else MOST_PARALLEL + 1
    if number > MOST_PARALLEL:
        return MOST_PARALLEL, (f"OLLAMA_NUM_PARALLEL={wanted}: no more than {MOST_PARALLEL} requests run at once",)
    return number, ()


def _models_dir(given: str | None, environ: Mapping[str, str]) -> Path:
    if given:
        return Path(os.path.expanduser(given))  # noqa: PTH111 - a shell leaves `--models-dir=~/x` as it is
    named = environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    if named:
        return Path(named)
    # It stays `~` for a user without HOME and without an entry in the system's list, where Path.home() raises.
    home = Path(environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111
    store = home / ".ollama" / "models"
    if not home.is_absolute():
        return _SERVICE_STORE
    # Path.is_dir would raise where the store of a service is closed to other users.
    return _SERVICE_STORE if not os.path.isdir(store) and os.path.isdir(_SERVICE_STORE) else store  # noqa: PTH112
