"""The wall clock may jump: only the time of log lines is taken from it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import runner

_ROOT = Path(runner.__file__).parent
WALL = {
    "time.time",
    *("time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime", "fromtimestamp"),
}
LAST = {name.rpartition(".")[2] for name in WALL}


def clocks(path: Path) -> Iterator[str]:
    """Yields the names by which a file reads the wall clock."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{alias.name}" for alias in node.names if f"time.{alias.name}" in WALL)
        elif isinstance(node, ast.Attribute) and node.attr in LAST and {node.attr, ast.unparse(node)} & WALL:
            yield node.attr


def test_only_log_lines_and_the_ages_of_files_use_the_wall_clock() -> None:
    """A jump makes files of the disk cache older or younger: it keeps some longer, or loses them."""
    paths = [path for folder in (_ROOT, _ROOT.parent / "protocol") for path in folder.rglob("*.py")]
    users = {str(path.relative_to(_ROOT)): found for path in paths if (found := list(clocks(path)))}
    assert users == {"disk/files.py": ["time"], "logs.py": ["fromtimestamp"]}
