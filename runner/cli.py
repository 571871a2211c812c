"""The command line and the environment, made into frozen settings. Nothing else looks into either of them."""

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner import __version__, logs
from runner.errors import UsageError
from runner.flags import CHECK_FLAGS, FLAGS, MOST_PARALLEL, ON_OFF, Flag
from runner.settings import DEFAULT_PARALLEL, CheckSettings, Settings
from runner.sizes import Bound, parse_bound

CHECK = "check"
"""The first word of `mlx-runner check`."""

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
_GO_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), "on"),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), "off"),
}
_NO_MODEL = "name a model of the Ollama store or a directory"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from the words after the program's name. UsageError says what is wrong with them.

    Exits by itself after `--help` and `--version`.
    """
    words, hosted = _without_host_words(argv)
    values = _values(_parser(), FLAGS, words, environ)
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
        cache=values["cache"],
        cache_memory=_bound(values, "cache-memory"),
        kv_bits=kv_bits,
        parallel=parallel,
        max_gap_s=_whole(values, "max-gap-ms", 1, 60_000) / 1000,
        prefill_chunk_tokens=_whole(values, "prefill-chunk", 1, 1 << 20) if "prefill-chunk" in values else None,
        blas=values["blas"],
        blas_threads=_whole(values, "blas-threads", 1, 1024),
        log_level=_log_level(values, environ),
        watch_parent=values.get("watch-parent", "on" if hosted else "off") == "on",
        remarks=(*kv_remarks, *parallel_remarks),
    )


def parse_check(words: Sequence[str], environ: Mapping[str, str]) -> CheckSettings:
    """Settings from the words after `check`; the rest as `parse`."""
    values = _values(_check_parser(), CHECK_FLAGS, words, environ)
    model = values.get("model") or environ.get("MLX_RUNNER_MODEL", "").strip()
    if not model:
        raise UsageError(f"{_NO_MODEL}: mlx-runner check NAME|DIR")
    return CheckSettings(
        model=model,
        models_dir=_models_dir(values.get("models-dir"), environ),
        context_tokens=_context(values),
        verify=values["verify"] == "on",
        dtype=values["dtype"],
        blas=values["blas"],
        blas_threads=_whole(values, "blas-threads", 1, 1024),
        json=values["json"] == "on",
        log_level=_log_level(values, environ),
    )


def _values(
    parser: argparse.ArgumentParser, flags: Sequence[Flag], words: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """What holds, by the names of the flags: the flag, else its variable, else the default."""
    given = vars(parser.parse_args(_go_style(words, flags)))
    values = {name: value for name, value in given.items() if value is not None}
    for flag in flags:
        if flag.name not in values:
            from_environment = environ.get(flag.variable, "").strip() or flag.default
            if from_environment is not None:
                values[flag.name] = _checked(flag, from_environment)
    return values


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


def _go_style(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Go takes `-model` for `--model` and `--verbose` for `--verbose=true`; so do we."""
    switches = {f"--{flag.name}" for flag in flags if flag.is_switch}
    result: list[str] = []
    for word in words:
        if word in ON_OFF and result and result[-1] in switches:
            result[-1] += f"={word}"
            continue
        dashed = f"-{word}" if word[:1] == "-" and word[1:2].isalpha() and len(word) > 2 else word
        name, equals, value = dashed.partition("=")
        result.append(f"{name}={_GO_BOOLEANS.get(value, value)}" if equals and name in switches else dashed)
    return [f"{word}=on" if word in switches else word for word in result]


class _Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog,
            usage,
            description,
            epilog,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=100),
            allow_abbrev=False,
            add_help=False,
        )

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse exits here; we raise
        raise UsageError(f"{message}; see {self.prog} --help")

    def add_flags(self, flags: Sequence[Flag]) -> None:
        groups: dict[str, argparse._ArgumentGroup] = {}
        for flag in flags:
            _add(groups.setdefault(flag.group, self.add_argument_group(flag.group)), flag)
        about = self.add_argument_group("about")
        about.add_argument("-h", "--help", action="help", help="show this and exit")
        about.add_argument("--version", action="version", version=f"mlx-runner {__version__}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mlx-runner",
        usage="mlx-runner --model NAME|DIR [--port N] [flags]\n       mlx-runner check NAME|DIR [flags]",
        description="Serves one MLX model to an Ollama host, or to curl, on 127.0.0.1. `mlx-runner check` says what a"
        " model is and all that is wrong with it, without reading its weights.",
        epilog="Every flag can also be given as an environment variable: --prefill-chunk is MLX_RUNNER_PREFILL_CHUNK."
        " A host starts it as: mlx-runner runner --mlx-engine --model NAME --port N",
    )
    parser.add_flags(FLAGS)
    return parser


def _check_parser() -> argparse.ArgumentParser:
    parser = _Parser(
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


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    shown = f"{flag.help} (default: {flag.default})" if flag.default and not flag.is_switch else flag.help
    group.add_argument(
        f"--{flag.name}",
        dest=flag.name,
        metavar=flag.metavar,
        nargs="?" if flag.is_switch else None,
        choices=flag.choices or None,
        help=shown.replace("%", "%%"),  # argparse formats it
    )


def _checked(flag: Flag, value: str) -> str:
    value = _GO_BOOLEANS.get(value, value) if flag.is_switch else value
    if flag.choices and value not in flag.choices:
        raise UsageError(f"{flag.variable}={value}: choose one of {', '.join(flag.choices)}")
    return value


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
    home = Path(environ.get("HOME") or Path.home()) / ".ollama" / "models"
    # Path.is_dir would raise where the store of a service is closed to other users.
    return _SERVICE_STORE if not os.path.isdir(home) and os.path.isdir(_SERVICE_STORE) else home  # noqa: PTH112
