"""The file of a check: figures and faults by part, without a path or a name of whoever ran it."""

import base64
import gzip
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from scripts.tools import ROOT
from scripts.tools.device.parts import Row

_SOURCES = ("runner", "protocol", "scripts")
_KINDS = (".py", ".h", ".cpp", ".toml")
_MOST_TAPES = 6 << 20  # bytes, in a form of the file; an issue takes 25 MB
_LAST_LINES = 40


Status = Literal["passed", "differed", "failed", "stopped"]


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of a part. `stopped`: its time was up, and it is tried again; `stops` counts that."""

    status: Status
    seconds: float
    why: str = ""
    stops: int = 0
    rows: Sequence[Row] = ()
    output: Sequence[str] = ()
    """The last lines of a part that did not pass."""
    tapes: dict[str, str] = {}
    """Recordings of its runners, gzip in base64: `mlx-runner replay` takes them apart (docs/replay.md)."""

    @property
    def is_fault(self) -> bool:
        return self.status in ("differed", "failed")


class Result(msgspec.Struct, frozen=True):
    """The contents of the file. A part that is missing did not run."""

    device: str
    commit: str
    sources: str
    """A digest of the program: only results with the same one belong together."""
    date: str
    tiny: bool
    parts: dict[str, Outcome] = {}

    def write(self, path: Path) -> None:
        """Writes the file whole: an end meanwhile leaves the old one."""
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        new.replace(path)


def read(path: Path) -> Result | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError):
        return None


def commit() -> str:
    """Returns the commit, with a mark if files have changed since; empty if git does not tell."""
    command = "git describe --always --exclude='*' --abbrev=12 --dirty=', changed'"
    return subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def sources() -> str:
    """Returns a digest of the program's text."""
    digest = blake2b(digest_size=6)
    for path in sorted(path for folder in _SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in _KINDS):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def scrubbed(text: str) -> str:
    """Returns the text without the folders, the user and the machine of whoever runs this."""
    for path, name in ((ROOT, "."), (Path(tempfile.gettempdir()), "$TMPDIR"), (Path.home(), "~")):
        if path != Path(path.anchor):
            text = text.replace(str(path), name)
    for word, name in ((os.environ.get("USER") or Path.home().name, "USER"), (platform.node(), "HOST")):
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", name, text) if word else text
    return text


def rows_of(lines: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Returns the rows among the lines of a part, scrubbed, and the other lines."""
    rows, others = list[Row](), list[str]()
    for line in lines:
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError:
            others.append(line)
        else:
            figures = {name: _short(value) for name, value in row.figures.items()}
            rows.append(Row(scrubbed(row.name), scrubbed(row.found), row.good, figures))
    return rows, others


def _short(figure: object) -> object:
    """Returns a figure with four digits, and other values as they are."""
    match figure:
        case float():
            return float(f"{figure:.4g}")
        case list():
            return [_short(each) for each in figure]
    return figure


def last_lines(text: str) -> list[str]:
    return [scrubbed(line) for line in text.splitlines()[-_LAST_LINES:]]


def tapes_in(folder: Path) -> dict[str, str]:
    """Returns the recordings in a folder, as many as an issue takes."""
    found, room = dict[str, str](), _MOST_TAPES
    for path in sorted(folder.iterdir(), key=os.path.getsize):
        tape = base64.b64encode(gzip.compress(path.read_bytes())).decode()
        if len(tape) <= room:
            room -= len(tape)
            found[path.name] = tape
    return found
