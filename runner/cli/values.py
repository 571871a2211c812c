"""How words become the values of flags: the words of the command line, then the environment, then the defaults."""

import argparse
import platform
import sys
import textwrap
from collections.abc import Mapping, Sequence

from runner import __version__
from runner.cli.flags import ON_OFF, Command, Flag
from runner.errors import UsageError

_WIDTH = 80
_STANDS_ON = ("mlx", "mlx-lm")
_GO_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), "on"),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), "off"),
}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{version_text()}\n")
        parser.exit()


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog,
            usage,
            textwrap.fill(description, _WIDTH),
            textwrap.fill(epilog, _WIDTH),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=27, width=_WIDTH),
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
        about.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")

    def add_commands(self, commands: Sequence[Command]) -> None:
        """Only to be shown: whoever names one does not come here."""
        lines = [f"  {f'{command.name} {command.words}':<23}  {command.short}" for command in commands]
        self.add_argument_group("commands", "\n".join(line[2:] for line in lines))


def version_text() -> str:
    """`mlx-runner 0.1.0 (mlx 0.32.4, mlx-lm 0.31.3, Python 3.11.7)`, with what is installed."""
    from importlib.metadata import PackageNotFoundError, version  # which no server needs

    parts = []
    for name in _STANDS_ON:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return f"mlx-runner {__version__} ({', '.join(parts)}, Python {platform.python_version()})"


def values_of(
    parser: Parser, flags: Sequence[Flag], words: Sequence[str], environ: Mapping[str, str]
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


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    shown = f"{flag.short} [{flag.default}]" if flag.default and not flag.is_switch else flag.short
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
