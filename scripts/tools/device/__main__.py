"""Tries the runner on this machine's device, a borrowed GPU or somebody's Mac, and writes one file about it.

All models are random or come with this repository; nothing is fetched. Every part runs in a process of its own, so that
a crash costs one part only. After Ctrl-C, or when the minutes are over, the same command goes on with the parts that
are missing, as long as the program is the same.

Exit status: 0: nothing that ran differed or failed; 1: something did; 2: wrong options. Parts that did not run are
named.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from re import sub
from shutil import copytree
from threading import Lock
from typing import NoReturn

from runner.versions import installed as installed_version
from scripts.tools import ROOT
from scripts.tools.device import result
from scripts.tools.device.parts import INSTALLATION, PARTS, Part, Row
from scripts.tools.device.result import Outcome, Result

_LOOK_S, _GRACE_S = 0.05, 5.0
_LEAST_S = 5.0
"""No part begins with less time than this."""
WORKERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""The number of parts that run together. The compiler of kernels, for which a first run waits, uses one core."""
_KERNELS = Lock()
_UNTIL_TOLD_S = 3.0
_SHOWN = 110  # characters of a line


def main(words: Sequence[str] | None = None) -> int:
    """Runs the parts. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {part.name:<13} {part.what}" for part in PARTS),
    )
    parser.add_argument("--minutes", type=float, default=8, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument(
        "--only",
        action="append",
        choices=[part.name for part in PARTS],
        metavar="PART",
        help="this part, even if it has run (repeatable)",
    )
    parser.add_argument("--fresh", action="store_true", help="run parts again that have run")
    parser.add_argument("--tiny", action="store_true", help="small models and few cases: a try of the check itself")
    parser.add_argument("--folder", type=Path, default=ROOT, help="of the file (default: the repository)")
    parser.add_argument("--cwd", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    folder = arguments.cwd / arguments.folder
    if not arguments.minutes > 0 or not folder.is_dir():
        parser.error("--minutes needs a number above 0, and --folder a folder that exists")
    minutes = Minutes(arguments.minutes)
    installed = run(INSTALLATION, minutes, tiny=arguments.tiny)
    device = next((str(row.figures["device"]) for row in installed.rows if "device" in row.figures), "unknown")
    sources, date = result.sources(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    name = sub(r"\W+", "-", f"device-check-{device}-{sources}{'-tiny' * arguments.tiny}").strip("-")
    path = folder.resolve() / f"{name}.json"
    former = None if arguments.fresh else result.read(path)
    known = dict(former.parts) if former else {}
    found = Result(device, result.commit(), sources, date, arguments.tiny, known)
    print(f"{device}, commit {found.commit or 'unknown'}, at most {arguments.minutes:g} minutes", flush=True)
    wanted = [part for part in PARTS if not arguments.only or part == INSTALLATION or part.name in arguments.only]
    todo = [part for part in wanted if arguments.only or part.name not in known or known[part.name].status == "stopped"]

    def keep(part: Part, outcome: Outcome) -> None:
        known[part.name] = outcome
        found.write(path)
        _tell(part, outcome, minutes)

    keep(INSTALLATION, installed)
    try:
        for alone, group in groupby(filter(INSTALLATION.__ne__, todo), key=attrgetter("alone")):
            stops = {part: known[part.name].stops if part.name in known else 0 for part in group}
            with ThreadPoolExecutor(1 if alone else WORKERS) as pool:
                running = {
                    pool.submit(run, part, minutes, tiny=arguments.tiny, stops=count): part
                    for part, count in stops.items()
                }
                try:
                    for each in as_completed(running):
                        if each.result().seconds:
                            keep(running[each], each.result())
                except KeyboardInterrupt:
                    minutes.are_over = True
                    raise
    except KeyboardInterrupt:
        print("\nended; the same command goes on with what is missing", file=sys.stderr)
    return _sum_up(found, wanted, path, minutes)


class Minutes:
    """The time for all parts. A twentieth is kept back, in which running parts end."""

    def __init__(self, minutes: float) -> None:
        self.are_over = False
        self._until = time.monotonic() + 57 * minutes

    @property
    def left_s(self) -> float:
        return 0.0 if self.are_over else max(0.0, self._until - time.monotonic())

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.left_s), 60)
        return f"[{minutes}:{seconds:02} left]"


def run(part: Part, minutes: Minutes, *, tiny: bool, stops: int = 0) -> Outcome:
    """Runs a part until it ends or time is up. Returns an outcome of 0 seconds if there is no time to begin. `stops` is
    the number of times that the part has reached its limit before."""
    if minutes.left_s < _LEAST_S and part != INSTALLATION:
        return Outcome("stopped", 0)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="device-check-", ignore_cleanup_errors=True) as folder:
        tapes, own, lines, errors = (Path(folder, name) for name in ("tapes", "tmp", "lines", "errors"))
        for each in (tapes, own):
            each.mkdir()
        with _kernels(Path(folder, "kernels")) as kernels, lines.open("wb") as to, errors.open("wb") as errors_to:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.part", part.rows, *["--tiny"] * tiny],
                cwd=ROOT,
                env=_environment(own, tapes, kernels),
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=errors_to,
                start_new_session=True,
            )
            try:
                stopped = _wait(process, part, lines, minutes, part.limit_s * (1 + stops))
                said = lines.read_text(errors="replace")  # a part that is ended finds that wrong
            finally:
                _end(process)
        rows, others = result.rows_of(said.splitlines())
        stops += stopped and minutes.left_s > 0  # its own limit
        status, why = _verdict(process.returncode, rows, stopped, stops)
        passed = status == "passed"
        return Outcome(
            status,
            round(time.monotonic() - begin, 1),
            why,
            stops,
            rows,
            () if passed else result.last_lines("\n".join([*others, errors.read_text(errors="replace")])),
            {} if status in ("passed", "stopped") else result.tapes_in(tapes),
        )


@contextmanager
def _kernels(own: Path) -> Iterator[Path]:
    """Lends a part the kernels that MLX has compiled on this machine, and keeps those that it adds. Parts that run
    together cannot share a folder, where one might read what another has half written."""
    shared = Path(
        os.environ.get("MLX_PTX_CACHE_DIR") or Path(tempfile.gettempdir(), "mlx", installed_version("mlx"), "ptx")
    )
    own.mkdir()
    with _KERNELS, suppress(OSError):
        if shared.is_dir():
            copytree(shared, own, dirs_exist_ok=True)
    try:
        yield own
    finally:
        with _KERNELS, suppress(OSError):  # the folder may be somebody else's
            if any(own.iterdir()):
                copytree(own, shared, dirs_exist_ok=True)


def _environment(own: Path, tapes: Path, kernels: Path) -> dict[str, str]:
    """Returns the variables of a part, which puts its temporary files into folders that are removed with it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLX_RUNNER_")}
    ours = {"TMPDIR": own, "DEVICE_TAPES": tapes, "MLX_PTX_CACHE_DIR": kernels}
    blas = {"MLX_RUNNER_BLAS": "auto", "MLX_RUNNER_BLAS_THREADS": "auto"}
    # Without TF32, a GPU's short products differ by rounding alone.
    return {"MLX_ENABLE_TF32": "0", **kept, **{name: str(path) for name, path in ours.items()}, **blas}


def _wait(process: "subprocess.Popen[bytes]", part: Part, lines: Path, minutes: Minutes, limit_s: float) -> bool:
    """Waits for the end of a part, and shows where it is. Returns True if it has to be ended."""
    begin = time.monotonic()
    while process.poll() is None:
        took = time.monotonic() - begin
        if took > limit_s or not minutes.left_s:
            return True
        if sys.stderr.isatty() and took > _UNTIL_TOLD_S:
            rows, _ = result.rows_of(lines.read_text(errors="replace").splitlines()[-1:])
            _show(f"{minutes} {part.name}: {rows[0].name if rows else part.what} ...")
        time.sleep(_LOOK_S)
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a part with all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _verdict(status: int, rows: Sequence[Row], stopped: bool, stops: int) -> tuple[result.Status, str]:
    wrong = [row.name for row in rows if not row.good]
    if stopped:
        return ("failed" if stops > 1 else "differed" if wrong else "stopped"), "its time was up"
    if status:
        return "failed", f"ended: {signal.strsignal(-status)}" if status < 0 else f"exit status {status}"
    return ("differed", ", ".join(wrong)) if wrong else ("passed", "")


def _show(text: str) -> None:
    """Shows a text on a terminal in place of the last one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:_SHOWN]}", end="", file=sys.stderr, flush=True)


def _tell(part: Part, outcome: Outcome, minutes: Minutes) -> None:
    _show("")
    why = f" ({outcome.why})" if outcome.why else ""
    print(f"{minutes} {part.name}: {outcome.status}{why}, {len(outcome.rows)} rows, {outcome.seconds:.0f} s")
    for row in outcome.rows:
        if not row.good:
            print(f"    {row.name}: {' '.join(row.found.split())[:_SHOWN]}")
    sys.stdout.flush()


def _sum_up(found: Result, wanted: Sequence[Part], path: Path, minutes: Minutes) -> int:
    """Prints the end of the check. Returns the exit status."""
    missing = [
        part.name for part in PARTS if part.name not in found.parts or found.parts[part.name].status == "stopped"
    ]
    faults = [name for name, outcome in found.parts.items() if outcome.is_fault]
    passed = sum(outcome.status == "passed" for outcome in found.parts.values())
    told = [f"{passed} of {len(PARTS)} parts passed"]
    told += [f"differed or failed: {', '.join(faults)}"] * bool(faults)
    told += [f"not run: {', '.join(missing)} (the same command goes on with them)"] * bool(missing)
    print(f"\n{'; '.join(told)}. {minutes}")
    print(f"{path} ({path.stat().st_size / 1e3:.0f} kB)")
    print(
        "Please open an issue of this project and attach that file: it has figures of this machine, and none of your"
        " texts, paths or names."
    )
    return int(any(part.name in faults for part in wanted))


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was found
        sys.exit(130)
