"""Benchmarks. Every comparison runs its contenders in turns, on models made on the spot from a seed.

While others use the machine it refuses to report. `all` runs one benchmark after the other, each in a process of its
own. Exit status: 0; 1 when a target is missed; 2 when the options make no sense; 3 when the machine is busy.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn, Protocol, TextIO, cast

from runner import blas
from runner.errors import UsageError
from scripts.tools import ROOT
from scripts.tools.bench.machine import BusyError, Others, check_quiet, describe_machine
from scripts.tools.bench.options import BUSY, MEASURED, MET, MISSED, USAGE, threads
from scripts.tools.bench.report import Report, Target, targets_table, text_of, write_json

ALL = "all"


BENCHMARKS = {
    "start": "from the spawn to the first answer, and the first request against later ones",
    "decode": "tokens per second of one stream, against the loop without a server; --drafts: what drafts bring",
    "ttft": "time to the first token: cold, again, one turn appended, between conversations; --disk, --picture",
    "parallel": "several users of one runner at once: throughput, gaps, waits, sharing",
    "cache": "prefix caches under the requests of several agents, every kind of model",
    "real": "a trained model, beside mlx_lm.server and llama.cpp",
}
"""What each measures, in the order of `all`. A module of this name has the two functions of `BenchmarkModule`, and is
imported only when it is chosen."""


class BenchmarkModule(Protocol):
    """The functions of a module of BENCHMARKS, beside a docstring that describes it."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds its own options to those of all benchmarks."""
        ...

    def run(self, arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
        """Measures. `say` is told the progress. ValueError if the options make no sense."""
        ...


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark, or all: prints tables, writes JSON, draws pictures. Returns the exit status."""
    common = _common_options()
    first, _ = common.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    try:
        fast_blas = blas.preload(first.blas, threads(first.blas_threads))  # before anything imports MLX
    except (UsageError, argparse.ArgumentTypeError) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return USAGE
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, summary in {ALL: "all of these", **BENCHMARKS}.items():
        sub = chosen.add_parser(
            name, help=summary, parents=[common], formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in argv[:1] and name in BENCHMARKS:
            module = _module(name)
            sub.description = module.__doc__
            module.add_arguments(sub)
    arguments = parser.parse_args(argv)
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "--plot needs matplotlib: run scripts/bench, which installs it, or pip install -r requirements/bench.lock"
        )
    try:
        if arguments.benchmark == ALL:
            return run_all(list(BENCHMARKS), arguments)
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
    report = _module(arguments.benchmark).run(arguments, lambda text: print(text, file=sys.stderr, flush=True))
    if not arguments.busy:
        others.check()
    machine["others"] = others.cores()
    print(text_of([targets_table(report.targets)], note=report.table()), file=table_to, flush=True)
    if arguments.json:
        targets = [target.data() for target in report.targets]
        write_json(
            arguments.json, {"benchmark": arguments.benchmark, "machine": machine, "targets": targets, **report.figures}
        )
    if arguments.plot:
        report.plot(arguments.plot)
    return MET if all(target.met for target in report.targets) else MISSED


def run_all(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Returns the exit status: that of one that could not be measured, else whether all targets are met.

    One that could not does not keep the others from being measured.
    """
    found: dict[str, dict[str, object]] = {}
    targets: list[Target] = []
    failed: dict[str, int] = {}
    if arguments.plot:
        arguments.plot.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"--- {name}", file=sys.stderr, flush=True)
        with TemporaryDirectory(prefix="bench-") as folder:
            file = Path(folder) / "found.json"
            words = [name, "--json", str(file), *_words(name, arguments)]
            status = run_one(words, sys.stderr if arguments.json == "-" else None)
            if status not in MEASURED:
                failed[name] = status
                continue
            found[name] = json.loads(file.read_text())
        targets += _targets(name, found[name]["targets"])
    print(text_of([targets_table(targets)]), file=sys.stderr if arguments.json == "-" else sys.stdout, flush=True)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    if arguments.json:
        write_json(arguments.json, {"benchmarks": found, "targets": [target.data() for target in targets]})
    if failed:
        return max(failed.values())
    return MET if all(target.met for target in targets) else MISSED


def run_one(words: Sequence[str], output: TextIO | None) -> int:
    """One benchmark in a process of its own, which does not outlive this one. Returns its exit status."""
    with subprocess.Popen([sys.executable, "-m", "scripts.tools.bench", *words], cwd=ROOT, stdout=output) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


def _words(name: str, arguments: argparse.Namespace) -> Iterator[str]:
    yield from ("--seed", str(arguments.seed), "--blas", arguments.blas, "--blas-threads", arguments.blas_threads)
    for peer, command in arguments.peer:
        yield from ("--peer", f"{peer}={shlex.join(command)}")
    if arguments.busy:
        yield "--busy"
    if arguments.plot:
        yield from ("--plot", str((arguments.plot / f"{name}.png").resolve()))


def _targets(name: str, found: object) -> Iterator[Target]:
    assert isinstance(found, list)
    for one in found:
        yield Target(f"{name}: {one['what']}", *(one[field] for field in Target._fields[1:]))


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--seed", type=int, default=1, help="of everything that is random (default: %(default)s)")
    common.add_argument("--json", metavar="FILE|-", help="write all figures as JSON; '-': to standard output")
    common.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw a picture; installs matplotlib if needed; all: a folder"
    )
    common.add_argument(
        "--peer",
        action="append",
        default=[],
        type=_peer,
        metavar="NAME=COMMAND",
        help="another contender: any executable that speaks the runner protocol; may be repeated",
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


def _module(name: str) -> BenchmarkModule:
    return cast("BenchmarkModule", importlib.import_module(f"scripts.tools.bench.{name}"))


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    """Ends what runs. One signal is enough: `all` passes on a Ctrl-C that its benchmark has got itself, and what ends
    the servers must not be disturbed."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell that starts this in the background has it ignore SIGINT
        signal.signal(each, _interrupt)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # requests whose servers end with them
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt as interrupt:
        by_signal = interrupt.args == (signal.SIGTERM,)
        if sys.argv[1:2] != [ALL]:  # its benchmark says it
            print(f"scripts/bench: ended by {'SIGTERM' if by_signal else 'Ctrl-C'}, without a report", file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if by_signal else signal.SIGINT))
