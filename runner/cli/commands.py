"""The table of commands, and the parsers and shell completions made from the table.

A parser has the help texts of a command's row and the flags of the command's settings. From the same parsers, shtab
writes the scripts by which a shell completes the command line.
"""

import argparse
import platform
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import get_args

import msgspec

from runner import __version__
from runner.errors import UsageError
from runner.settings import (
    HAND_OVER,
    CheckSettings,
    Flag,
    FollowSettings,
    ReplaySettings,
    Settings,
    Start,
    TopSettings,
    flags_of,
)
from runner.versions import NEEDED, installed


class Argument(msgspec.Struct, frozen=True):
    """A positional argument of a command."""

    group: str
    name: str
    metavar: str
    help: str
    is_needed: bool = False


class Command(msgspec.Struct, frozen=True):
    """A command of the program: its texts and flags. The command without a name serves a model."""

    name: str
    words: str = ""
    """The words that may follow the command, as the list of commands in `mlx-runner --help` shows them."""
    short: str = ""
    program: str = ""
    """The words that start the command, for the command's own `--help`. Empty if the command has no such help."""
    usage: str = ""
    """The words that may follow `program` in the command's own `--help`."""
    description: str = ""
    epilog: str = ""
    argument: Argument | None = None
    settings: type[msgspec.Struct] | None = None
    """The struct whose fields define the command's flags. None for a command without flags."""
    below: tuple["Command", ...] = ()
    """The subcommands."""


OLLAMA_SERVE = Command(
    "serve",
    "[OLLAMA ...]",
    "start an installed Ollama with this runner",
    "mlx-runner ollama serve",
    "[--runner COMMAND] [OLLAMA [ARGUMENT ...]]",
    "Starts an installed Ollama whose MLX models run on this runner. The installation is not changed.",
    "Ollama and its runners inherit your environment: OLLAMA_HOST, OLLAMA_MODELS and the like work as usual, and so do"
    " the runner's own variables, which `mlx-runner --help` lists:\n"
    "MLX_RUNNER_KV_BITS=8 mlx-runner ollama serve\n"
    "\n"
    "Only MLX models (model_format safetensors) run on this runner; GGUF models stay with Ollama. MLX_RUNNER_HAND_OVER"
    " says which MLX models Ollama's own runner takes over: "
    + "; ".join(f"`{word}`, {models}" for word, models in HAND_OVER.items())
    + ". Ollama's log has the lines of both.",
    Argument("what to start", "ollama", "OLLAMA", "Ollama's executable [ollama, from PATH]"),
)
OLLAMA = Command(
    "ollama",
    "serve",
    "start your Ollama with this runner for MLX models",
    "mlx-runner ollama",
    "COMMAND ...",
    "Commands for an installed Ollama. They do not change the installation.",
    "More: mlx-runner ollama serve --help.",
    below=(OLLAMA_SERVE,),
)
CHECK = Command(
    "check",
    "NAME|DIR",
    "report what a model is and every problem with it",
    "mlx-runner check",
    "NAME|DIR [flags]",
    "Reads the headers of a model, not its weights, and reports what it is and every problem that would keep it from"
    " loading. With --verify, also reads and tries all of it. Exit status 0: it would load; 1: it would not, or the"
    " format is refused; 2: the command line is wrong.",
    "The flags mean the same as for `mlx-runner`, and have the same environment variables.",
    Argument("what to check", "model", "NAME|DIR", "a model in the Ollama store, or a Hugging Face style directory"),
    CheckSettings,
)
TOP = Command(
    "top",
    "[--port N | URL]",
    "watch a runner from another terminal",
    "mlx-runner top",
    "[--port N | URL] [--once]",
    "Shows the requests, tokens, memory and prefix cache of a runner until Ctrl-C. If the output is not a terminal,"
    " prints them once. The page at the runner's address shows more.",
    "Every flag can also be set by an environment variable: --port by MLX_RUNNER_PORT.",
    Argument("what to watch", "url", "URL", "the runner's address, such as http://127.0.0.1:11500, or its port"),
    TopSettings,
)
REPLAY = Command(
    "replay",
    "FILE",
    "compute a recording again (--record), and compare",
    "mlx-runner replay",
    "FILE [--model NAME|DIR] [flags]",
    "Computes again what `mlx-runner --record FILE` recorded, and compares every token and every event. Exit status 0:"
    " everything was equal; 1: something differed, or the recording cannot be replayed here; 2: the command line is"
    " wrong.",
    "All other settings are those of the recording.",
    Argument("what to replay", "file", "FILE", "the recording", is_needed=True),
    ReplaySettings,
)
FOLLOW = Command(
    "follow",
    "",
    "compute a part of a model for other machines",
    "mlx-runner follow",
    "--listen ADDRESS:PORT --secret-file FILE [flags]",
    "Waits for leaders (`mlx-runner --followers`) on other machines, and computes a part of a model for one of them at"
    " a time. Holds no model while it waits. Runs until Ctrl-C.",
    "Make the secret once, and copy its file to all machines: (umask 077; openssl rand -hex 32 > FILE). Prompts and"
    " answers cross the network unencrypted: use a cable, or a network of your own.\n"
    "\n"
    "Every flag can also be set by an environment variable: --listen by MLX_RUNNER_LISTEN.",
    settings=FollowSettings,
)
COMPLETION = Command("completion", "SHELL", "tab completion: source <(mlx-runner completion bash)")
VERSION = Command("version", "", "show the versions of the runner, MLX and Python")
SERVER = Command(
    "",
    program="mlx-runner",
    usage="--model NAME|DIR [--port N] [flags]\n       mlx-runner COMMAND ...",
    description="Serves one MLX model on 127.0.0.1, to Ollama or to any HTTP client.",
    epilog="Defaults are in brackets. MLX_RUNNER_KV_BITS sets --kv-bits, and so on. Try it:\n"
    """curl localhost:PORT/completion -d '{"Prompt":"Hi","Options":{"num_predict":9}}'""",
    settings=Settings,
    below=(OLLAMA, CHECK, TOP, REPLAY, FOLLOW, COMPLETION, VERSION),
)

GONE = {"draft-known": "prompts that come again get their first token without a forward, with no flag"}
"""Flag of an earlier version -> what happens without the flag, for a message."""
_WIDTH = 80
_UNKNOWN = "unrecognized arguments: "
"""The beginning of argparse's message about words that no flag or argument accepts."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{version_text()}\n")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser for a command. Raises UsageError where argparse would exit, and wraps the help to 80 columns."""

    def __init__(self, command: Command) -> None:
        super().__init__(
            command.program,
            f"{command.program} {command.usage}",
            _wrapped(command.description),
            _wrapped(command.epilog),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=27, width=_WIDTH),
            allow_abbrev=False,
            add_help=False,
        )
        if command.below:  # only listed here: `parse_command` looks for subcommands before any parser runs
            lines = [f"  {f'{each.name} {each.words}':<23}  {each.short}" for each in command.below]
            self.add_argument_group("commands", "\n".join(line[2:] for line in lines))
        if word := command.argument:
            nargs = None if word.is_needed else "?"
            group = self.add_argument_group(word.group)
            group.add_argument(word.name, nargs=nargs, metavar=word.metavar, help=word.help)
            if command is OLLAMA_SERVE:
                what = "the command of another runner, quoted as one word [this one]"
                group.add_argument(
                    "words", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments for Ollama [serve]"
                )
                group.add_argument("--runner", metavar="COMMAND", help=what)
                group.add_argument("--start", choices=get_args(Start), help=argparse.SUPPRESS)
        if command.settings:
            self._add_flags(flags_of(command.settings).values())
        about = self.add_argument_group("about")
        about.add_argument("-h", "--help", action="help", help="show this and exit")
        about.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse's own method exits the process
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        unknown = [word.partition("=")[0] for word in message.removeprefix(_UNKNOWN).split() if word.startswith("--")]
        for word in unknown:
            if now := GONE.get(word.removeprefix("--")):
                raise UsageError(f"{word} is gone: leave it out ({now})")
        meant = nearest(unknown, flags, "--") if message.startswith(_UNKNOWN) else ""
        raise UsageError(f"{message}{f'{meant} See' if meant else '; see'} {self.prog} --help")

    def _add_flags(self, flags: Iterable[Flag]) -> None:
        groups: dict[str, argparse._ArgumentGroup] = {}
        for flag in flags:
            group = groups.setdefault(flag.group, self.add_argument_group(flag.group))
            shown = f"{flag.short} [{flag.default}]" if flag.default and not flag.is_switch else flag.short
            group.add_argument(
                f"--{flag.name}",
                dest=flag.name,
                metavar=flag.metavar,
                nargs="?" if flag.is_switch else None,
                choices=flag.choices or None,
                help=shown.replace("%", "%%"),  # since argparse formats help texts with `%`
            )


def nearest(words: Iterable[str], known: Iterable[str], prefix: str = "") -> str:
    """Returns `: did you mean ...?` with the known word nearest to each of `words`, or an empty text if no known word
    is near. All words begin with `prefix`, which is not compared."""
    from difflib import get_close_matches  # imported here, since serving needs no difflib

    candidates = [each.removeprefix(prefix) for each in known]
    found = [near for word in words for near in get_close_matches(word.removeprefix(prefix), candidates, n=1)]
    return f": did you mean {' and '.join(prefix + near for near in dict.fromkeys(found))}?" if found else ""


def version_text() -> str:
    """Returns the installed versions, such as `mlx-runner 0.1.0 (mlx 0.32.4, mlx-lm 0.31.3, Python 3.11.7)`."""
    parts = [f"{name} {version}" if (version := installed(name)) else f"no {name}" for name in NEEDED]
    return f"mlx-runner {__version__} ({', '.join(parts)}, Python {platform.python_version()})"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, _WIDTH) for line in text.split("\n"))


SHELLS = ("bash", "zsh", "fish")


def completion(words: Sequence[str]) -> str:
    """Returns the completion script for a shell. Raises UsageError unless `words` are one name in SHELLS."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(
            f"name a shell: mlx-runner completion {'|'.join(SHELLS)}; for bash, add this to your ~/.bashrc:"
            " source <(mlx-runner completion bash)"
        )
    import shtab  # imported here, since serving needs no shtab

    return shtab.complete(_parser(SERVER), words[0])


def _parser(command: Command) -> argparse.ArgumentParser:
    """Returns a parser of a command and its subcommands, from which shtab writes a script. It parses no words."""
    import shtab

    paths = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE, "OLLAMA": shtab.FILE}
    parser = argparse.ArgumentParser(add_help=False) if command is COMPLETION else Parser(command)
    if command is COMPLETION:
        parser.add_argument("shell", choices=SHELLS)
    for action in parser._actions:
        kind = str(action.metavar).rpartition("|")[2]
        if kind in paths:
            action.complete = paths[kind]  # type: ignore[attr-defined]  # shtab's own attribute
    if command.below:
        below = parser.add_subparsers(parser_class=argparse.ArgumentParser)
        for each in command.below:
            parents = [] if each is VERSION else [_parser(each)]
            below.add_parser(each.name, help=each.short, parents=parents, add_help=False)
    return parser
