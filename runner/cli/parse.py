"""From the words of the command line and the environment to the settings of a command."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner.cli.command_flags import CHECK_FLAGS, FOLLOW_FLAGS, REPLAY_FLAGS, TOP_FLAGS
from runner.cli.commands import OLLAMA_COMMANDS
from runner.cli.convert import (
    blas_threads,
    context_tokens,
    disk_directory,
    followers,
    kv_bits,
    listen_address,
    log_level,
    memory_bound,
    models_dir,
    needed_secret_file,
    parallel,
    ranks,
    runner_url,
    secret_file,
    whole_number,
)
from runner.cli.flag import ON_OFF, Flag
from runner.cli.flags import FLAGS
from runner.cli.parser import (
    Parser,
    check_parser,
    follow_parser,
    ollama_parser,
    ollama_serve_parser,
    replay_parser,
    server_parser,
    top_parser,
    version_text,
)
from runner.drafts.policy import MOST_TOKENS
from runner.errors import UsageError
from runner.process import parent
from runner.settings import (
    CheckSettings,
    FollowSettings,
    LaunchSettings,
    OllamaRunner,
    ReplaySettings,
    Settings,
    TopSettings,
)

# --- The text of every flag: from the command line, else from its environment variable, else its default.

_GO_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), "on"),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), "off"),
}


def flag_values(
    parser: Parser, flags: Sequence[Flag], words: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the text of each flag by the flag's name; a flag without text and without default is left out."""
    given = vars(parser.parse_args(_normalized(words, flags)))
    values = {name: value for name, value in given.items() if value is not None}
    for flag in flags:
        if flag.name not in values:
            from_environment = environ.get(flag.variable, "").strip() or flag.default
            if from_environment is not None:
                values[flag.name] = _checked(flag, from_environment)
    return values


def _normalized(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Rewrites Go's spellings, which hosts use: `-model` as `--model`, `--verbose` as `--verbose=on`."""
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


def _checked(flag: Flag, value: str) -> str:
    value = _GO_BOOLEANS.get(value, value) if flag.is_switch else value
    if flag.choices and value not in flag.choices:
        raise UsageError(f"{flag.variable}={value}: choose one of {', '.join(flag.choices)}")
    return value


_ENGINE = "--mlx-engine"
_NO_MODEL = "name a model in the Ollama store, or a directory"


def _completion(words: Sequence[str]) -> str:
    from runner.cli.completion import completion  # no server needs it

    return completion(words)


_PRINTED: dict[str, Callable[[Sequence[str]], str]] = {
    "completion": _completion,
    "version": lambda _: f"{version_text()}\n",
}
"""The commands that print a text and exit."""


AnySettings = Settings | CheckSettings | TopSettings | ReplaySettings | FollowSettings


def parse_command(argv: Sequence[str], environ: Mapping[str, str]) -> AnySettings:
    """Returns the settings of the command that the first word names, or of the server. Raises UsageError."""
    match argv[:1]:
        case ["check"]:
            return parse_check(argv[1:], environ)
        case ["top"]:
            return parse_top(argv[1:], environ)
        case ["replay"]:
            return parse_replay(argv[1:], environ)
        case ["follow"]:
            return parse_follow(argv[1:], environ)
    return parse(argv, environ)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Returns the server's settings from the words after the program's name. Raises UsageError.

    Exits by itself after `--help` and `--version`, and after `completion` and `version`.
    """
    if argv[:1] and (text := _PRINTED.get(argv[0])):
        sys.stdout.write(text(argv[1:]))
        raise SystemExit(0)
    words, hosted = _without_host_words(argv)
    values = flag_values(server_parser(), FLAGS, words, environ)
    if not values.get("model"):
        raise UsageError(f"--model is missing: {_NO_MODEL}")
    bits, kv_warnings = kv_bits(values, environ)
    running, parallel_warnings = parallel(values, environ)
    here, others = ranks(values), followers(values)
    return Settings(
        model=values["model"],
        port=whole_number(values, "port", 0, 65535),
        models_dir=models_dir(values.get("models-dir"), environ),
        context_tokens=context_tokens(values),
        verify=values["verify"] == "on",
        dtype=values["dtype"],
        trace=Path(values["trace"]) if "trace" in values else None,
        record=Path(values["record"]) if "record" in values else None,
        memory=memory_bound(values, "memory"),
        cache=values["cache"],
        cache_memory=memory_bound(values, "cache-memory"),
        disk_cache=disk_directory(values),
        disk_memory=memory_bound(values, "disk-memory"),
        kv_bits=bits,
        ranks=1 + len(others) if others else here,
        ranks_here=here,
        followers=others,
        secret_file=secret_file(values),
        parallel=running,
        max_gap_s=whole_number(values, "max-gap-ms", 1, 60_000) / 1000,
        draft=values["draft"],
        draft_tokens=whole_number(values, "draft-tokens", 1, MOST_TOKENS) if "draft-tokens" in values else None,
        draft_known=_draft_known(values),
        prefill_chunk_tokens=whole_number(values, "prefill-chunk", 1, 1 << 20) if "prefill-chunk" in values else None,
        blas=values["blas"],
        blas_threads=blas_threads(values),
        log_level=log_level(values, environ),
        no_media=values["no-media"] == "on",
        inspect_text=values["inspect-text"] == "on",
        watch_parent=values.get("watch-parent", "on" if hosted else "off") == "on",
        hosted=hosted,
        hand_over=values["hand-over"],
        ollama=_ollama_runner(argv, environ) if hosted else None,
        warnings=(*kv_warnings, *parallel_warnings),
    )


def _draft_known(values: Mapping[str, str]) -> bool:
    known = values["draft-known"] == "on"
    if known and values["cache"] != "trie":
        raise UsageError(f"--draft-known takes answers from the trie, which --cache {values['cache']} does not keep")
    return known


def parse_check(words: Sequence[str], environ: Mapping[str, str]) -> CheckSettings:
    """Returns the settings of `mlx-runner check` from the words after it; else as `parse`."""
    values = flag_values(check_parser(), CHECK_FLAGS, words, environ)
    model = values.get("model") or environ.get("MLX_RUNNER_MODEL", "").strip()
    if not model:
        raise UsageError(f"{_NO_MODEL}: mlx-runner check NAME|DIR")
    return CheckSettings(
        model=model,
        models_dir=models_dir(values.get("models-dir"), environ),
        context_tokens=context_tokens(values),
        verify=values["verify"] == "on",
        draft=values["draft"],
        dtype=values["dtype"],
        memory=memory_bound(values, "memory"),
        blas=values["blas"],
        blas_threads=blas_threads(values),
        disk_cache=disk_directory(values),
        json=values["json"] == "on",
        log_level=log_level(values, environ),
    )


def parse_top(words: Sequence[str], environ: Mapping[str, str]) -> TopSettings:
    """Returns the settings of `mlx-runner top` from the words after it; else as `parse`."""
    values = flag_values(top_parser(), TOP_FLAGS, words, environ)
    return TopSettings(url=runner_url(values), once=values["once"] == "on", log_level=log_level(values, environ))


def parse_replay(words: Sequence[str], environ: Mapping[str, str]) -> ReplaySettings:
    """Returns the settings of `mlx-runner replay` from the words after it; else as `parse`."""
    values = flag_values(replay_parser(), REPLAY_FLAGS, words, environ)
    return ReplaySettings(
        file=Path(values["file"]),
        model=values.get("model"),
        models_dir=models_dir(values.get("models-dir"), environ),
        log_level=log_level(values, environ),
    )


def parse_follow(words: Sequence[str], environ: Mapping[str, str]) -> FollowSettings:
    """Returns the settings of `mlx-runner follow` from the words after it; else as `parse`."""
    values = flag_values(follow_parser(), FOLLOW_FLAGS, words, environ)
    address = listen_address(values)
    return FollowSettings(
        address=address.host,
        port=address.port,
        secret_file=needed_secret_file(values),
        models_dir=models_dir(values.get("models-dir"), environ),
        log_level=log_level(values, environ),
    )


def parse_ollama(words: Sequence[str]) -> LaunchSettings:
    """Returns the settings of `mlx-runner ollama serve` from the words after `ollama`; else as `parse`."""
    if words[:1] != ["serve"]:
        if words[:1] and words[0] in ("-h", "--help", "--version"):
            ollama_parser().parse_args(words[:1])
        names = ", ".join(f"mlx-runner ollama {command.name}" for command in OLLAMA_COMMANDS)
        raise UsageError(f"name a command: {names}; see mlx-runner ollama --help")
    given = ollama_serve_parser().parse_args(words[1:])
    return LaunchSettings(ollama=given.ollama, words=given.words or ["serve"], runner=given.runner, start=given.start)


def _without_host_words(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Returns `argv` without the words by which a host names its engine, and True if they were there."""
    words = list(argv)
    hosted = words[:1] == ["runner"]
    if hosted:
        del words[0]
        if words and (words[0].endswith("-engine") or not words[0].startswith("-")) and words[0] != _ENGINE:
            raise UsageError(f"unknown runner engine, expected {_ENGINE}")
    if words[:1] == [_ENGINE]:
        del words[0]
    return words, hosted


def _ollama_runner(argv: Sequence[str], environ: Mapping[str, str]) -> OllamaRunner | None:
    """Returns Ollama's own runner as `mlx-runner ollama serve` describes it; None if that has not started this one."""
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
