"""`scripts/test --mutants [WORD ...]`: tries all mutants, or those whose row has one of these words.

Exits with 1 if one survives, does not fit the code any more, or if its tests fail without it too.
"""

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from tests import CORES, ROOT
from tests.mutants import Mutant, mutants

LIMIT_S = 600
"""For the tests of one mutant. One that never ends is noticed by that."""
PASSED, FAILED = 0, 1  # exit statuses of pytest


def copy_tree(to: Path) -> None:
    """Copies what git tracks or would, and what was compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "runner").rglob("*.so")]
    for name in filter(None, [*listed, *compiled]):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def run_tests(root: Path, by: str, limit_s: int = LIMIT_S) -> tuple[int | None, str]:
    """The exit status of pytest, None if it took too long, and what it wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "-p", "no:cacheprovider", *by.split()]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_DATABASE": "no"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"more than {limit_s} s"
    return done.returncode, done.stdout + done.stderr


def verdict(mutant: Mutant, root: Path) -> str:
    """Tries one; empty if the tests noticed it."""
    before = mutant.apply(root)
    try:
        status, _ = run_tests(root, mutant.by)
    finally:
        (root / mutant.file).write_text(before)
    if status == PASSED:
        return "survived"
    noticed = status in (FAILED, None) or status < 0  # MLX may end the process of the tests
    return "" if noticed else f"its tests could not be run (exit status {status} of pytest)"


def work(waiting: "queue.SimpleQueue[Mutant]", found: list[tuple[Mutant, str]], total: int) -> None:
    """Tries one after the other, in a copy of the tree of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        root = Path(name)
        copy_tree(root)
        while not waiting.empty():
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            started = monotonic()
            text = verdict(mutant, root)
            found.append((mutant, text))
            seconds = monotonic() - started
            print(
                f"{len(found):4}/{total}  {text or 'noticed'}  {mutant.file}: {mutant.breaks}  ({seconds:.0f} s)",
                flush=True,
            )


def main(words: Sequence[str]) -> int:
    """Tries those that are chosen."""
    if any(word.startswith("-") for word in words):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    chosen = [each for each in mutants() if not words or any(word in " ".join(each) for word in words)]
    if not chosen:
        print(f"no mutant has a row with {' or '.join(words)}: the tables are tests/mutants/*.toml")
        return 1
    if misfits := [each.misfit for each in chosen if each.misfit]:
        print(*misfits, sep="\n")
        return 1
    return try_all(chosen)


def try_all(chosen: Sequence[Mutant]) -> int:
    """Tries these, on all cores, and names the bad ones. Returns the exit status."""
    tests = sorted({word for each in chosen for word in each.by.split()})
    print(f"{len(chosen)} mutants; their tests without them: {len(tests)} files")
    status, written = run_tests(ROOT, " ".join(tests), LIMIT_S * len(tests))
    if status != PASSED:
        print(written, "these fail without any mutant: mend them first", sep="\n")
        return 1
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for each in chosen:
        waiting.put(each)
    found: list[tuple[Mutant, str]] = []
    workers = [
        threading.Thread(target=work, args=(waiting, found, len(chosen))) for _ in range(min(len(chosen), CORES))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    bad = [(mutant, text) for mutant, text in found if text]
    for mutant, text in bad:
        print(f"{text}: {mutant.table}, {mutant.file}: {mutant.breaks} (by {mutant.by})")
    print(f"{len(found) - len(bad)} of {len(chosen)} mutants were noticed")
    return 1 if bad or len(found) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
