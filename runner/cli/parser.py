"""The argparse parser of a command, made from the table of commands and from the flags of its settings."""

import argparse
import platform
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import get_args

from runner import __version__
from runner.cli.commands import OLLAMA_SERVE, Command
from runner.errors import UsageError
from runner.settings import Flag, Start, flags_of

_WIDTH = 80
_REPORTED = ("mlx", "mlx-lm")
"""The packages whose versions `mlx-runner version` prints."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{version_text()}\n")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError where argparse would exit, and wraps its texts to a terminal's width."""

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
        if command.below:
            self._list(command.below)
        if word := command.argument:
            nargs = None if word.is_needed else "?"
            group = self.add_argument_group(word.group)
            group.add_argument(word.name, nargs=nargs, metavar=word.metavar, help=word.help)
            if command is OLLAMA_SERVE:
                _add_ollama(group)
        if command.settings:
            self._add_flags(flags_of(command.settings).values())
        about = self.add_argument_group("about")
        about.add_argument("-h", "--help", action="help", help="show this and exit")
        about.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse exits here; we raise
        raise UsageError(f"{message}; see {self.prog} --help")

    def _list(self, commands: Sequence[Command]) -> None:
        """Lists the commands in the help. They are dispatched before any parser runs (`parse_command`)."""
        lines = [f"  {f'{command.name} {command.words}':<23}  {command.short}" for command in commands]
        self.add_argument_group("commands", "\n".join(line[2:] for line in lines))

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
                help=shown.replace("%", "%%"),  # argparse formats it
            )


def _add_ollama(group: argparse._ArgumentGroup) -> None:
    """Adds what `mlx-runner ollama serve` takes: it has no variables."""
    group.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments for Ollama [serve]")
    group.add_argument(
        "--runner", metavar="COMMAND", help="the command of another runner, quoted as one word [this one]"
    )
    group.add_argument("--start", choices=get_args(Start), help=argparse.SUPPRESS)


def version_text() -> str:
    """`mlx-runner 0.1.0 (mlx 0.32.4, mlx-lm 0.31.3, Python 3.11.7)`: this version and those of what is installed."""
    from importlib.metadata import PackageNotFoundError, version  # which no server needs

    parts = []
    for name in _REPORTED:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return f"mlx-runner {__version__} ({', '.join(parts)}, Python {platform.python_version()})"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, _WIDTH) for line in text.split("\n"))
