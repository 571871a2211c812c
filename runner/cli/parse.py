"""Makes the settings of a command from the words of the command line and the environment."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from runner.cli.commands import (
    CHECK,
    FOLLOW,
    GONE,
    OLLAMA,
    OLLAMA_SERVE,
    REPLAY,
    SERVER,
    TOP,
    Command,
    Parser,
    completion,
    nearest,
    version_text,
)
from runner.cli.convert import (
    GO_BOOLEANS,
    MAKE_ONE,
    Given,
    check_together,
    fields_of,
    listen_address,
    log_level,
    runner_url,
)
from runner.errors import UsageError
from runner.process import parent
from runner.settings import (
    ON_OFF,
    VARIABLES,
    CheckSettings,
    Flag,
    FollowSettings,
    LaunchSettings,
    OllamaRunner,
    ReplaySettings,
    Settings,
    TopSettings,
    flags_of,
)


def _given(command: Command, words: Sequence[str], environ: Mapping[str, str]) -> Given:
    """Returns the texts of a command's flags and arguments. Leaves out flags that have no text and no default."""
    assert command.settings, command
    flags = [*flags_of(command.settings).values()]
    found = vars(Parser(command).parse_args(_normalized(words, flags)))
    values = {name: value for name, value in found.items() if value is not None}
    variables = set[str]()
    for flag in flags:
        if flag.name in values:
            continue
        if text := environ.get(flag.variable, "").strip():
            values[flag.name] = _checked(flag, text)
            variables.add(flag.name)
        elif flag.default is not None:
            values[flag.name] = flag.default
    return Given(values, environ, [], variables)


def _normalized(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Rewrites the spellings of Go's flags, which hosts use: `-model` as `--model`, `--verbose` as `--verbose=on`."""
    switches = {f"--{flag.name}" for flag in flags if flag.is_switch}
    result: list[str] = []
    for word in words:
        if word in ON_OFF and result and result[-1] in switches:
            result[-1] += f"={word}"
            continue
        dashed = f"-{word}" if word[:1] == "-" and word[1:2].isalpha() and len(word) > 2 else word
        name, equals, value = dashed.partition("=")
        result.append(f"{name}={GO_BOOLEANS.get(value, value)}" if equals and name in switches else dashed)
    return [f"{word}=on" if word in switches else word for word in result]


def _checked(flag: Flag, value: str) -> str:
    value = GO_BOOLEANS.get(value, value) if flag.is_switch else value
    if flag.choices and value not in flag.choices:
        raise UsageError(f"{flag.variable}={value}: choose one of {', '.join(flag.choices)}")
    return value


_ENGINE = "--mlx-engine"
_NO_MODEL = "name a model in the Ollama store, or a directory"
AnySettings = Settings | CheckSettings | TopSettings | ReplaySettings | FollowSettings


def parse_command(argv: Sequence[str], environ: Mapping[str, str]) -> AnySettings:
    """Returns the settings of the command that the first word names, or else the server's. Raises UsageError.

    Prints and exits for `completion`, `version`, and the flags `--help` and `--version` of every command.
    """
    match argv:
        case [name, *words] if parse := _PARSERS.get(name):
            return parse(words, environ)
        case ["help", *_] | ["completion" | "version", "-h" | "--help", *_]:
            return parse_server(["--help"], environ)
        case ["completion", *words]:
            _print(completion(words))
        case ["version", *_]:
            _print(f"{version_text()}\n")
        case [word, *words] if word != "runner" and not word.startswith("-"):
            raise UsageError(_no_command(word, words))
    return parse_server(argv, environ)


_SERVING = ("serve", "run", "start", "load")
_OF_OLLAMA = ("cp", "create", "launch", "list", "ls", "ps", "pull", "push", "rm", "show", "signin", "stop")


def _no_command(word: str, words: Sequence[str]) -> str:
    """Returns a message about a first word that is neither a command nor a flag, with advice."""
    if word in _OF_OLLAMA:
        return f"{word} is a command of ollama, not of mlx-runner; see mlx-runner --help"
    model = word
    if word in _SERVING:
        model = next((each for each in words if not each.startswith("-")), "NAME|DIR")
    elif meant := nearest([word], [command.name for command in SERVER.below]):
        return f"{word} is no command{meant} See mlx-runner --help"
    return (
        f"{word} is no command: mlx-runner --model {model} --port N serves a model, mlx-runner check {model} examines"
        " it, mlx-runner ollama serve starts Ollama with this runner; see mlx-runner --help"
    )


def unknown_variables(environ: Mapping[str, str]) -> str:
    """Returns a warning about variables that begin as the runner's do, but belong to no flag. Empty without any."""
    ours = [name for name in environ if name.startswith(VARIABLES) and not name.startswith(parent.OLLAMA)]
    commands = [command.settings for command in (SERVER, *SERVER.below) if command.settings] if ours else []
    known = {flag.variable for settings in commands for flag in flags_of(settings).values()}
    odd = sorted({*ours} - known)
    return "; ".join(_unknown(name, known) for name in odd)


def _unknown(name: str, known: Iterable[str]) -> str:
    if now := GONE.get(name.removeprefix(VARIABLES).lower().replace("_", "-")):
        return f"{name} is gone: leave it out ({now})"
    return f"{name} is no variable of this runner{nearest([name], known, VARIABLES)}"


def _print(text: str) -> NoReturn:
    sys.stdout.write(text)
    raise SystemExit(0)


def parse_server(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Returns the settings for serving a model, which needs no command. Raises UsageError."""
    words, hosted = _without_host_words(argv)
    given = _given(SERVER, words, environ)
    if not given.values.get("model"):
        raise UsageError(f"--model is missing: {_NO_MODEL}")
    fields = {
        "watch_parent": hosted,
        **fields_of(Settings, given),
        "hosted": hosted,
        "ollama": _ollama_runner(argv, environ) if hosted else None,
        "warnings": (*given.warnings,),
    }
    settings = msgspec.convert(fields, Settings)
    settings = msgspec.structs.replace(settings, ranks=settings.ranks_here + len(settings.followers))
    check_together(settings)
    return settings


def parse_check(words: Sequence[str], environ: Mapping[str, str]) -> CheckSettings:
    """Returns the settings of `mlx-runner check` from the words after it. Raises UsageError."""
    given = _given(CHECK, words, environ)
    model = given.values.get("model") or environ.get("MLX_RUNNER_MODEL", "").strip()
    if not model:
        raise UsageError(f"{_NO_MODEL}: mlx-runner check NAME|DIR")
    return msgspec.convert({**fields_of(CheckSettings, given), "model": model}, CheckSettings)


def parse_top(words: Sequence[str], environ: Mapping[str, str]) -> TopSettings:
    """Returns the settings of `mlx-runner top` from the words after it. Raises UsageError."""
    given = _given(TOP, words, environ)
    fields = {**fields_of(TopSettings, given), "url": runner_url(given), "log_level": log_level(given)}
    return msgspec.convert(fields, TopSettings)


def parse_replay(words: Sequence[str], environ: Mapping[str, str]) -> ReplaySettings:
    """Returns the settings of `mlx-runner replay` from the words after it. Raises UsageError."""
    given = _given(REPLAY, words, environ)
    return msgspec.convert({**fields_of(ReplaySettings, given), "file": Path(given.values["file"])}, ReplaySettings)


def parse_follow(words: Sequence[str], environ: Mapping[str, str]) -> FollowSettings:
    """Returns the settings of `mlx-runner follow` from the words after it. Raises UsageError."""
    given = _given(FOLLOW, words, environ)
    address = listen_address(given)
    if not given.values.get("secret-file"):
        raise UsageError(f"--secret-file is missing: {MAKE_ONE}")
    fields = {**fields_of(FollowSettings, given), "address": address.host, "port": address.port}
    return msgspec.convert(fields, FollowSettings)


_PARSERS: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], AnySettings]] = {
    "check": parse_check,
    "top": parse_top,
    "replay": parse_replay,
    "follow": parse_follow,
}


def parse_ollama(words: Sequence[str]) -> LaunchSettings:
    """Returns the settings of `mlx-runner ollama serve` from the words after `ollama`. Raises UsageError."""
    if words[:1] != ["serve"]:
        if words[:1] and words[0] in ("-h", "--help", "--version"):
            Parser(OLLAMA).parse_args(words[:1])
        names = ", ".join(f"mlx-runner ollama {command.name}" for command in OLLAMA.below)
        raise UsageError(f"name a command: {names}; see mlx-runner ollama --help")
    given = Parser(OLLAMA_SERVE).parse_args(words[1:])
    return LaunchSettings(ollama=given.ollama, words=given.words or ["serve"], runner=given.runner, start=given.start)


def _without_host_words(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Removes a host's words `runner` and `--mlx-engine`. Returns the other words, and True if `runner` was there."""
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
    """Returns Ollama's own runner, from the variables that `mlx-runner ollama serve` sets. None without them."""
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
