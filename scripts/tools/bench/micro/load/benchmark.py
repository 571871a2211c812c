"""`scripts/bench load`: how fast weights become a model, against MLX's own reading of the same files.

Models of random bytes are written into a temporary folder (TMPDIR says where), form by form, and removed afterwards.
Each turn is a process of its own: a loader loads everything and says how long it took and how much memory. The loaders
take turns, after one round that does not count. By default all files are in the page cache, so this measures what
loading itself costs; with --cold a disk has its say too.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.tools import ROOT
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.options import names_of, size_bytes
from scripts.tools.bench.micro.load.forms import FORMS, Made
from scripts.tools.bench.micro.load.report import FormReport, LoadReport, Row
from scripts.tools.bench.micro.load.turn import LOADERS, MLX_LM, PLAIN, Task, Turn


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings."""

    forms: Sequence[str] = tuple(FORMS)
    loaders: Sequence[str] = tuple(LOADERS)
    size_bytes: int = 1 << 30
    turns: int = 7
    cold: bool = False
    seed: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    usual = Options()
    parser.epilog = _JSON
    parser.add_argument(
        "--form",
        action="append",
        choices=FORMS,
        metavar="FORM",
        help="run this one only, may be repeated: "
        + "; ".join(f"{name}: {form.meaning}" for name, form in FORMS.items()),
    )
    parser.add_argument(
        "--loaders",
        type=names_of(tuple(LOADERS)),
        default=usual.loaders,
        metavar="LOADER,...",
        help=f"of {', '.join(LOADERS)}; {PLAIN} always runs, {MLX_LM} where there is a directory (default: all)",
    )
    parser.add_argument(
        "--size",
        type=size_bytes,
        default=usual.size_bytes,
        metavar="BYTES",
        help="of each model, about: 256MiB, 4G (default: 1GiB); all of it has to fit into memory twice",
    )
    parser.add_argument(
        "--turns", type=int, default=usual.turns, metavar="N", help="of each loader (default: %(default)s)"
    )
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before every turn")


_JSON = """
JSON: benchmark, machine (what it ran on), seed, turns, cold, yardstick (the loader that is 100 percent), forms. For
each form: form, tensors, files, weight_bytes, loaders. For each loader: gb_per_s, percent, peak_ratio and
resident_ratio (over weight_bytes), and turns, with one value for each turn in seconds, open_seconds, peak_bytes and
resident_bytes."""


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> LoadReport:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    options = Options(
        forms=arguments.form or tuple(FORMS),
        loaders=arguments.loaders,
        size_bytes=arguments.size,
        turns=arguments.turns,
        cold=arguments.cold,
        seed=arguments.seed,
    )
    return measure(options, say)


def measure(options: Options, say: Callable[[str], None] = lambda _: None) -> LoadReport:
    """Write each form and load it with every loader."""
    if options.turns < 1:
        raise ValueError("there is at least one turn")
    if options.cold and not hasattr(os, "posix_fadvise"):
        raise ValueError("this system cannot drop files from its page cache: --cold needs posix_fadvise")
    reports = []
    for name in options.forms:
        say(f"{name} ...")
        with TemporaryDirectory(prefix="bench-load-") as folder:
            made = FORMS[name].make(Path(folder), options.size_bytes, options.seed)
            os.sync()  # writing goes on behind a writer's back, and pages not yet written stay in the cache
            rows = _rows(made, options)
        reports.append(FormReport(name, FORMS[name].meaning, made.tensors, len(made.files), made.weight_bytes, rows))
    return LoadReport(options.seed, options.turns, options.cold, reports)


def _rows(made: Made, options: Options) -> list[Row]:
    loaders = [PLAIN, *(name for name in options.loaders if name != PLAIN and (name != MLX_LM or made.is_directory))]

    def turn(loader: str) -> Turn:
        if options.cold:
            _drop(made.files)
        return _turn(Task(loader, made.model, str(made.models_dir), [str(file) for file in made.files]))

    found = interleave({loader: partial(turn, loader) for loader in loaders}, options.turns)
    return [Row(loader, turns) for loader, turns in found.items()]


def _turn(task: Task) -> Turn:
    command = [sys.executable, "-m", "scripts.tools.bench.micro.load.turn"]
    ended = subprocess.run(
        command, input=json.dumps(task._asdict()), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True
    )
    return Turn(**json.loads(ended.stdout))


def _drop(files: Sequence[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
