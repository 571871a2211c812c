"""The command line and the environment, made into one frozen Settings. Nothing else looks into either of them."""

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner import __version__, logs
from runner.errors import UsageError
from runner.flags import FLAGS, Flag
from runner.settings import Settings
from runner.sizes import Bound, parse_bound

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


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from the words after the program's name. UsageError says what is wrong with them.

    Exits by itself after `--help` and `--version`.
    """
    words, hosted = _without_host_words(argv)
    values = {name: value for name, value in vars(_parser().parse_args(_go_style(words))).items() if value is not None}
    for flag in FLAGS:
        if flag.name not in values:
            from_environment = environ.get(flag.variable, "").strip() or flag.default
            if from_environment is not None:
                values[flag.name] = _checked(flag, from_environment)
    if not values.get("model"):
        raise UsageError("--model is missing: name a model of the Ollama store or a directory")
    kv_bits, remarks = _kv_bits(values.get("kv-bits"), environ)
    return Settings(
        model=values["model"],
        port=_whole(values, "port", 0, 65535),
        models_dir=_models_dir(values.get("models-dir"), environ),
        cache=values["cache"],
        cache_memory=_bound(values, "cache-memory"),
        kv_bits=kv_bits,
        prefill_chunk_tokens=_whole(values, "prefill-chunk", 1, 1 << 20),
        blas=values["blas"],
        blas_threads=_whole(values, "blas-threads", 1, 1024),
        log_level=_LEVELS[values["log-level"]]
        if "log-level" in values
        else logs.level_from_ollama(environ.get("OLLAMA_DEBUG", "")),
        watch_parent=values.get("watch-parent", "on" if hosted else "off") == "on",
        remarks=remarks,
    )


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


def _go_style(words: Sequence[str]) -> list[str]:
    """Go takes `-model` for `--model` and `--verbose=true` for `--verbose`; so do we."""
    switches = {f"--{flag.name}" for flag in FLAGS if flag.is_switch}
    result = []
    for word in words:
        dashed = f"-{word}" if word[:1] == "-" and word[1:2].isalpha() and len(word) > 2 else word
        name, equals, _ = dashed.partition("=")
        result.append(name if equals and name in switches else dashed)
    return result


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse exits here; we raise
        raise UsageError(f"{message}; see mlx-runner --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mlx-runner",
        usage="mlx-runner --model NAME|DIR [--port N] [flags]",
        description="Serves one MLX model to an Ollama host, or to curl, on 127.0.0.1.",
        epilog="Every flag can also be given as an environment variable: --prefill-chunk is MLX_RUNNER_PREFILL_CHUNK."
        " A host starts it as: mlx-runner runner --mlx-engine --model NAME --port N",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=100),
        allow_abbrev=False,
        add_help=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in FLAGS:
        group = groups.setdefault(flag.group, parser.add_argument_group(flag.group))
        _add(group, flag)
    about = parser.add_argument_group("about")
    about.add_argument("-h", "--help", action="help", help="show this and exit")
    about.add_argument("--version", action="version", version=f"mlx-runner {__version__}")
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    shown = f"{flag.help} (default: {flag.default})" if flag.default else flag.help
    shown = shown.replace("%", "%%")  # argparse formats it
    if flag.is_switch:
        group.add_argument(f"--{flag.name}", dest=flag.name, action="store_const", const="on", help=shown)
    else:
        group.add_argument(
            f"--{flag.name}", dest=flag.name, metavar=flag.metavar, choices=flag.choices or None, help=shown
        )


def _checked(flag: Flag, value: str) -> str:
    if flag.choices and value not in flag.choices:
        raise UsageError(f"{flag.variable}={value}: choose one of {', '.join(flag.choices)}")
    return value


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


def _models_dir(given: str | None, environ: Mapping[str, str]) -> Path:
    named = given or environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    if named:
        return Path(named)
    home = Path(environ.get("HOME") or Path.home()) / ".ollama" / "models"
    # Path.is_dir would raise where the store of a service is closed to other users.
    return _SERVICE_STORE if not os.path.isdir(home) and os.path.isdir(_SERVICE_STORE) else home  # noqa: PTH112
