"""Lines of Python by folder, and their ceilings: `scripts/test` prints both, `unit/test_house.py` keeps them.

A ceiling rises only with a sentence, in the note that closes the work, that says what a reader gets for the lines.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests import ROOT

CORE = ("engine", "cache", "sampling", "tokenizer", "model")
CEILINGS: Mapping[str, int] = {
    "runner/model": 5_735,
    "runner/media": 4_660,
    "runner/drafts": 4_390,
    "runner/cache": 4_750,
    "runner/engine": 3_640,
    "runner/grammar": 3_460,
    "runner/disk": 2_850,
    "runner/*.py": 2_000,
    "runner/ranks": 1_640,
    "runner/tokenizer": 1_490,
    "runner/embeddings": 1_330,
    "runner/vlm": 1_290,
    "runner/numbers": 1_250,
    "runner/server": 1_210,
    "runner/tape": 1_130,
    "runner/commands": 1_100,
    "runner/sampling": 1_030,
    "runner/ollama": 850,
    "runner/cli": 820,
    "runner/process": 645,
    "runner/cpu": 520,
    "runner/kv_bits": 330,
    "tests": 64_565,
    "runner": 46_000,
    "scripts": 19_440,
    "core": 16_610,
    "protocol": 1_660,
}
"""By folder; `runner/*.py` are the files beside the folders, `core` the folders of CORE together."""


def sizes() -> dict[str, int]:
    """Returns the lines of Python of each folder that has a ceiling or should have one."""
    found = {
        f"runner/{path.name}": _lines(path) for path in (ROOT / "runner").iterdir() if (path / "__init__.py").exists()
    }
    found["runner/*.py"] = sum(map(_count, (ROOT / "runner").glob("*.py")))
    found["core"] = sum(found[f"runner/{name}"] for name in CORE)
    return found | {name: _lines(ROOT / name) for name in ("runner", "protocol", "scripts", "tests")}


def report() -> Iterator[str]:
    """Yields the sizes with their ceilings, those of `runner` in one line, the largest first."""
    found = sizes()
    folders = sorted((name for name in found if name.startswith("runner/")), key=found.__getitem__, reverse=True)
    for names in (folders, ["core", "runner", "protocol", "scripts", "tests"]):
        yield "Lines: " + ", ".join(
            f"{name.removeprefix('runner/')} {found[name]:,}/{CEILINGS[name]:,}" for name in names
        )


def _lines(folder: Path) -> int:
    return sum(map(_count, folder.rglob("*.py")))


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n")
