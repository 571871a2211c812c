"""`scripts/bench all`: every benchmark in a process of its own, and one list of targets."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from scripts.tools import ROOT
from scripts.tools.bench.options import MEASURED, MET, MISSED
from scripts.tools.bench.report import Target, targets_table, text_of, write_json


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
