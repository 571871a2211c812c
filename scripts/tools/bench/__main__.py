"""Benchmarks. Every comparison runs its contenders in turns, on models made on the spot from a seed.

While others use the machine it refuses to report. Exit status: 0; 1 when a target is missed; 2 when the options make no
sense; 3 when the machine is busy.
"""

import argparse
import importlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import NoReturn

from runner.errors import UsageError
from scripts.tools.bench.machine import BLAS, BusyError, Others, check_quiet, describe_machine, preload_blas
from scripts.tools.bench.report import Report, targets_table, text_of, write_json

BENCHMARKS = {
    "start": "from the spawn to the first answer",
    "decode": "tokens per second of one stream, against the loop without a server",
    "ttft": "time to the first token: cold, again, one turn appended, between conversations",
    "parallel": "several users of one runner at once: throughput, gaps, waits, sharing",
    "embeddings": "short texts at once, against one after the other",
    "drafts": "one and several answers with drafts, against the same without",
    "families": "other architectures beside the llama, by time per active parameter",
    "trace": "the prefix cache beside the optimum, on traces of agents and chats",
    "real": "a trained model, beside mlx_lm.server and llama.cpp",
}
"""Each benchmark with what it measures. A module of its name is imported only when it is chosen. It has two
functions: `add_arguments(parser)` adds its own options to those of all benchmarks; `run(arguments, say)` measures, says
how far it is, and returns a Report. It raises ValueError if the options make no sense."""
_TURNS = {
    "start": 7,
    "decode": 15,
    "ttft": 7,
    "parallel": 3,
    "embeddings": 5,
    "drafts": 3,
    "families": 3,
    "trace": 1,
    "real": 3,
}
MET, MISSED, USAGE, BUSY = range(4)
"""Exit statuses; with the last two there is no report."""


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark: prints tables, writes JSON. Returns the exit status."""
    common = _common_options()
    first, _ = common.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    os.environ.update(zip(BLAS, (first.blas, first.blas_threads), strict=True))
    try:
        fast_blas = preload_blas()
    except (UsageError, ValueError) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return USAGE
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, summary in BENCHMARKS.items():
        sub = chosen.add_parser(
            name, help=summary, parents=[common], formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.add_argument(
            "--turns", type=int, default=_TURNS[name], metavar="N", help="of each contender (default: %(default)s)"
        )
        if name in argv[:1]:
            module = _module(name)
            sub.description = module.__doc__
            module.add_arguments(sub)
    arguments = parser.parse_args(argv)
    if arguments.turns < 1:
        parser.error("there is at least one turn")
    try:
        return _run(arguments, fast_blas)
    except ValueError as error:
        parser.error(str(error))
    except BusyError as error:
        print(f"scripts/bench: {error}; wait until they are done, or measure all the same: --busy", file=sys.stderr)
        return BUSY


def _run(arguments: argparse.Namespace, fast_blas: str) -> int:
    table_to = sys.stderr if arguments.json == "-" else sys.stdout
    machine = describe_machine(fast_blas)
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + "\n", file=table_to, flush=True)
    if not arguments.busy:
        check_quiet()
    others = Others()
    report: Report = _module(arguments.benchmark).run(arguments, lambda text: print(text, file=sys.stderr, flush=True))
    if not arguments.busy:
        others.check()
    machine["others"] = others.cores()
    print(text_of([targets_table(report.targets), *report.tables], report.note), file=table_to, flush=True)
    if arguments.json:
        targets = [{**target._asdict(), "met": target.met} for target in report.targets]
        write_json(
            arguments.json, {"benchmark": arguments.benchmark, "machine": machine, "targets": targets, **report.figures}
        )
    return MET if all(target.met for target in report.targets) else MISSED


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--seed", type=int, default=1, help="of everything that is random (default: %(default)s)")
    common.add_argument("--json", metavar="FILE|-", help="write all figures as JSON; '-': to standard output")
    common.add_argument(
        "--peer",
        action="append",
        default=[],
        type=_peer,
        metavar="NAME=COMMAND",
        help="another contender: any executable that speaks the runner protocol; may be repeated",
    )
    common.add_argument(
        "--ollama",
        metavar="COMMAND",
        type=shlex.split,
        help="an executable of Ollama: beside its own runner, instead of mlx_lm.server; an MLX for it must be there",
    )
    common.add_argument("--busy", action="store_true", help="report even if others use the machine")
    common.add_argument(
        "--blas", default="auto", metavar="auto|off|PATH", help="as the runner's (default: %(default)s)"
    )
    common.add_argument(
        "--blas-threads", default="auto", metavar="auto|N", help="as the runner's (default: %(default)s)"
    )
    return common


def _peer(text: str) -> tuple[str, list[str]]:
    name, _, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if not name or not words:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=COMMAND is wanted")
    return name, words


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"scripts.tools.bench.{name}")


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    """Ends what runs. One signal is enough: what ends the servers must not be disturbed."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell that starts this in the background has it ignore SIGINT
        signal.signal(each, _interrupt)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # requests whose servers end with them
    logging.getLogger("runner.cache").setLevel(logging.ERROR)  # the budgets of traces are tight
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt as interrupt:
        by_signal = interrupt.args == (signal.SIGTERM,)
        print(f"scripts/bench: ended by {'SIGTERM' if by_signal else 'Ctrl-C'}, without a report", file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if by_signal else signal.SIGINT))
