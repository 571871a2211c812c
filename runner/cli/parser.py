"""The argparse parsers, made from the table of flags: one for the server and one for each command."""

import argparse
import platform
import sys
import textwrap
from collections.abc import Sequence
from typing import get_args

from runner import __version__
from runner.cli.command_flags import CHECK_FLAGS, FOLLOW_FLAGS, REPLAY_FLAGS, TOP_FLAGS
from runner.cli.commands import COMMANDS, OLLAMA_COMMANDS
from runner.cli.flag import Command, Flag
from runner.cli.flags import FLAGS
from runner.errors import UsageError
from runner.settings import Start

_WIDTH = 80
_REPORTED = ("mlx", "mlx-lm")
"""The packages whose versions `mlx-runner version` prints."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{version_text()}\n")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError where argparse would exit, and wraps its texts to a terminal's width."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog,
            usage,
            _wrapped(description),
            _wrapped(epilog),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=27, width=_WIDTH),
            allow_abbrev=False,
            add_help=False,
        )

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse exits here; we raise
        raise UsageError(f"{message}; see {self.prog} --help")

    def add_flags(self, flags: Sequence[Flag]) -> None:
        """Adds the flags in their groups."""
        groups: dict[str, argparse._ArgumentGroup] = {}
        for flag in flags:
            _add(groups.setdefault(flag.group, self.add_argument_group(flag.group)), flag)
        self.add_about()

    def add_about(self) -> None:
        """Adds `--help` and `--version`."""
        about = self.add_argument_group("about")
        about.add_argument("-h", "--help", action="help", help="show this and exit")
        about.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")

    def add_commands(self, commands: Sequence[Command]) -> None:
        """Lists the commands in the help. They are dispatched before any parser runs (`parse_command`)."""
        lines = [f"  {f'{command.name} {command.words}':<23}  {command.short}" for command in commands]
        self.add_argument_group("commands", "\n".join(line[2:] for line in lines))


def server_parser() -> Parser:
    """The parser of `mlx-runner` without a command, which serves a model."""
    parser = Parser(
        prog="mlx-runner",
        usage="mlx-runner --model NAME|DIR [--port N] [flags]\n       mlx-runner COMMAND ...",
        description="Serves one MLX model on 127.0.0.1, to an Ollama host or to any HTTP client.",
        epilog="Defaults are shown in brackets. Every flag can also be set by an environment variable: --kv-bits by"
        " MLX_RUNNER_KV_BITS. More: docs/flags.md, docs/operating.md.",
    )
    parser.add_commands(COMMANDS)
    parser.add_flags(FLAGS)
    return parser


def check_parser() -> Parser:
    """The parser of `mlx-runner check`."""
    parser = Parser(
        prog="mlx-runner check",
        usage="mlx-runner check NAME|DIR [flags]",
        description="Reads the headers of a model, not its weights, and reports what it is and every problem that would"
        " keep it from loading. Exit status 0: it would load; 1: it would not; 2: the command line is wrong.",
        epilog="The flags mean the same as for `mlx-runner`, and have the same environment variables.",
    )
    parser.add_argument_group("what to check").add_argument(
        "model", nargs="?", metavar="NAME|DIR", help="a model in the Ollama store, or a Hugging Face style directory"
    )
    parser.add_flags(CHECK_FLAGS)
    return parser


def top_parser() -> Parser:
    """The parser of `mlx-runner top`."""
    parser = Parser(
        prog="mlx-runner top",
        usage="mlx-runner top [--port N | URL] [--once]",
        description="Shows the requests, tokens, memory and prefix cache of a runner until Ctrl-C. If the output is not"
        " a terminal, prints them once. The page at the runner's address shows more.",
        epilog="Every flag can also be set by an environment variable: --port by MLX_RUNNER_PORT.",
    )
    parser.add_argument_group("what to watch").add_argument(
        "url", nargs="?", metavar="URL", help="the runner's address, such as http://127.0.0.1:11500, or its port"
    )
    parser.add_flags(TOP_FLAGS)
    return parser


def replay_parser() -> Parser:
    """The parser of `mlx-runner replay`."""
    parser = Parser(
        prog="mlx-runner replay",
        usage="mlx-runner replay FILE [--model NAME|DIR] [flags]",
        description="Computes again what `mlx-runner --record FILE` recorded, and compares every token and every event."
        " Exit status 0: everything was equal; 1: something differed, or the recording cannot be replayed here; 2: the"
        " command line is wrong.",
        epilog="All other settings are those of the recording.",
    )
    parser.add_argument_group("what to replay").add_argument("file", metavar="FILE", help="the recording")
    parser.add_flags(REPLAY_FLAGS)
    return parser


def follow_parser() -> Parser:
    """The parser of `mlx-runner follow`."""
    parser = Parser(
        prog="mlx-runner follow",
        usage="mlx-runner follow --listen ADDRESS:PORT --secret-file FILE [flags]",
        description="Waits for leaders (`mlx-runner --followers`) on other machines, and computes a part of a model for"
        " one of them at a time. Holds no model while it waits. Runs until Ctrl-C.",
        epilog="Every flag can also be set by an environment variable: --listen by MLX_RUNNER_LISTEN. More:"
        " docs/ranks.md.",
    )
    parser.add_flags(FOLLOW_FLAGS)
    return parser


def ollama_parser() -> Parser:
    """The parser of `mlx-runner ollama` without a further command: it can only show its help."""
    parser = Parser(
        prog="mlx-runner ollama",
        usage="mlx-runner ollama COMMAND ...",
        description="Commands for an installed Ollama. They do not change the installation.",
        epilog="More: mlx-runner ollama serve --help.",
    )
    parser.add_commands(OLLAMA_COMMANDS)
    parser.add_about()
    return parser


def ollama_serve_parser() -> Parser:
    """The parser of `mlx-runner ollama serve`."""
    parser = Parser(
        prog="mlx-runner ollama serve",
        usage="mlx-runner ollama serve [--runner COMMAND] [OLLAMA [ARGUMENT ...]]",
        description="Starts an installed Ollama whose MLX models run on this runner. The installation is not changed.",
        epilog="Ollama and its runners inherit your environment: OLLAMA_HOST, OLLAMA_MODELS and the like work as usual,"
        " and so do the runner's own variables, which `mlx-runner --help` lists:\n"
        "MLX_RUNNER_KV_BITS=8 mlx-runner ollama serve\n"
        "\n"
        "Only MLX models (model_format safetensors) run on this runner; GGUF models stay with Ollama. Ollama's own"
        " runner also takes over MLX models that this runner refuses to load, and models whose pictures only it can"
        " read. MLX_RUNNER_HAND_OVER changes that: `sound` also leaves it the models that take sound, `refused` only"
        " those that are refused here, `off` none.",
    )
    what = parser.add_argument_group("what to start")
    what.add_argument("ollama", nargs="?", metavar="OLLAMA", help="Ollama's executable [ollama, from PATH]")
    what.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments for Ollama [serve]")
    what.add_argument(
        "--runner", metavar="COMMAND", help="the command of another runner, quoted as one word [this one]"
    )
    what.add_argument("--start", choices=get_args(Start), help=argparse.SUPPRESS)
    parser.add_about()
    return parser


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


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, _WIDTH) for line in text.split("\n"))
