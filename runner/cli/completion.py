"""Scripts that complete the command line in a shell, written by shtab from the parsers."""

from argparse import ArgumentParser
from collections.abc import Sequence

import shtab

from runner.cli.commands import COMPLETION, SERVER, VERSION, Command
from runner.cli.parser import Parser
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
    return shtab.complete(_parser(SERVER), words[0])


def _parser(command: Command) -> ArgumentParser:
    """Returns the parser of a command with those of the commands below it, as shtab reads them; nothing is parsed with
    it."""
    parser = ArgumentParser(add_help=False) if command is COMPLETION else Parser(command)
    if command is COMPLETION:
        parser.add_argument("shell", choices=SHELLS)
    for action in parser._actions:
        kind = str(action.metavar).rpartition("|")[2]
        if kind in _PATHS:
            action.complete = _PATHS[kind]  # type: ignore[attr-defined]  # shtab's own attribute
    if command.below:
        below = parser.add_subparsers(parser_class=ArgumentParser)
        for each in command.below:
            parents = [] if each is VERSION else [_parser(each)]
            below.add_parser(each.name, help=each.short, parents=parents, add_help=False)
    return parser
