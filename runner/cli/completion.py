"""Scripts that complete the command line in a shell, written by shtab from the parsers."""

from argparse import ArgumentParser
from collections.abc import Sequence

import shtab

from runner.cli.commands import COMMANDS, OLLAMA_COMMANDS
from runner.cli.flag import Command
from runner.cli.parser import (
    check_parser,
    follow_parser,
    ollama_parser,
    ollama_serve_parser,
    replay_parser,
    server_parser,
    top_parser,
)
from runner.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
_PATHS = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE, "OLLAMA": shtab.FILE}
"""The completion of a value, by the last word of its metavar."""


def completion(words: Sequence[str]) -> str:
    """Returns the script for the shell that `words` name. Raises UsageError for another shell, or none."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(
            f"name a shell: mlx-runner completion {'|'.join(SHELLS)}; for bash, add this to your ~/.bashrc:"
            " source <(mlx-runner completion bash)"
        )
    shells = ArgumentParser(add_help=False)
    shells.add_argument("shell", choices=SHELLS)
    ollama = _with_commands(ollama_parser(), OLLAMA_COMMANDS, {"serve": ollama_serve_parser()})
    commands = {
        "ollama": ollama,
        "check": check_parser(),
        "top": top_parser(),
        "replay": replay_parser(),
        "follow": follow_parser(),
        "completion": shells,
    }
    return shtab.complete(_with_commands(server_parser(), COMMANDS, commands), words[0])


def _with_commands(
    parser: ArgumentParser, commands: Sequence[Command], parsers: dict[str, ArgumentParser]
) -> ArgumentParser:
    """Returns the parser with those of its commands below it, as shtab reads them; nothing is parsed with it."""
    for each in (parser, *parsers.values()):
        for action in each._actions:
            kind = str(action.metavar).rpartition("|")[2]
            if kind in _PATHS:
                action.complete = _PATHS[kind]  # type: ignore[attr-defined]  # shtab's own attribute
    below = parser.add_subparsers(parser_class=ArgumentParser)
    for command in commands:
        parents = [parsers[command.name]] if command.name in parsers else []
        below.add_parser(command.name, help=command.short, parents=parents, add_help=False)
    return parser
