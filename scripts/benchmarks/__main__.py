"""Benchmarks. Every comparison runs its contenders in turns in one process, on models made on the spot from a seed."""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from runner import blas
from runner.errors import UsageError


class Benchmark(NamedTuple):
    """One of BENCHMARKS: the module that has it, and what it measures."""

    module: str
    summary: str


BENCHMARKS = {
    "cache": Benchmark(
        "scripts.benchmarks.cache.benchmark", "prefix caches under the requests of several agents, every kind of model"
    ),
    "load": Benchmark(
        "scripts.benchmarks.load.benchmark", "how fast weights on disk become a model, and how much memory that takes"
    ),
    "parallel": Benchmark(
        "scripts.benchmarks.parallel.benchmark", "several users of one runner at once: throughput, gaps, waits, sharing"
    ),
}
"""By name. A module has the two functions of `BenchmarkModule`, and is imported only when it is chosen."""


class Report(Protocol):
    """What a benchmark found."""

    def table(self) -> str:
        """For a person, at most 132 columns wide."""
        ...

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        ...

    def plot(self, path: Path) -> None:
        """Draws a PNG with matplotlib."""
        ...


class BenchmarkModule(Protocol):
    """What a module of BENCHMARKS has, beside a docstring that says what it does."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its own options, beside those of all."""
        ...

    def run(self, arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
        """Measure. `say` is told how far it is. ValueError when the options make no sense."""
        ...


def main(argv: Sequence[str]) -> int:
    """Run one benchmark: its table, and JSON and a picture as wanted. Returns the exit status."""
    common = _common_options()
    first, _ = common.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    try:
        fast_blas = blas.preload(first.blas, first.blas_threads)  # before anything imports MLX
    except UsageError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    chosen = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        sub = chosen.add_parser(
            name, help=benchmark.summary, parents=[common], formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in argv[:1]:
            module = _module(name)
            sub.description = module.__doc__
            module.add_arguments(sub)
    arguments = parser.parse_args(argv)
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: run scripts/bench, which installs it, or pip install '.[bench]'")
    table_to = sys.stderr if arguments.json == "-" else sys.stdout
    ground = _ground(fast_blas)
    print(", ".join(f"{name} {value}" for name, value in ground.items()) + "\n", file=table_to, flush=True)
    try:
        report = _module(arguments.benchmark).run(arguments, lambda text: print(text, file=sys.stderr, flush=True))
    except ValueError as error:
        parser.error(str(error))
    print(report.table(), file=table_to, flush=True)
    if arguments.json:
        text = json.dumps({"benchmark": arguments.benchmark, "ground": ground, **report.data()}, indent=1)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n")
    if arguments.plot:
        report.plot(arguments.plot)
    return 0


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--seed", type=int, default=1, help="of everything that is random (default: %(default)s)")
    common.add_argument("--json", metavar="FILE|-", help="write all figures as JSON; '-': to standard output")
    common.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture; installs matplotlib if needed")
    common.add_argument(
        "--blas", default="auto", metavar="auto|off|PATH", help="as the runner's (default: %(default)s)"
    )
    common.add_argument("--blas-threads", type=int, default=1, metavar="N", help="its threads (default: %(default)s)")
    return common


def _module(name: str) -> BenchmarkModule:
    return cast("BenchmarkModule", importlib.import_module(BENCHMARKS[name].module))


def _ground(fast_blas: str) -> dict[str, object]:
    """What it runs on. `load` is the number of processes that wanted a core over the last minute."""
    import mlx.core as mx

    return {
        "mlx": version("mlx"),
        "device": mx.device_info().get("device_name") or str(mx.default_device()),
        "BLAS": fast_blas,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
