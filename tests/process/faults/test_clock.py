"""The wall clock may jump: only the time of log lines is taken from it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import runner
from scripts.tools.host.lib import Client, Request
from tests.process.conftest import FAULTY, SpawnModel

_ROOT = Path(runner.__file__).parent
WALL = {
    "time.time",
    *("time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime", "fromtimestamp"),
}


def clocks(path: Path) -> Iterator[str]:
    """Yields the names by which a file reads the wall clock."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{alias.name}" for alias in node.names if f"time.{alias.name}" in WALL)
        elif isinstance(node, ast.Attribute) and {node.attr, ast.unparse(node)} & WALL:
            yield node.attr


def test_only_log_lines_and_the_ages_of_files_use_the_wall_clock() -> None:
    """A jump makes files of the disk cache older or younger: it keeps some longer, or loses them."""
    users = {
        str(path.relative_to(_ROOT)): list(clocks(path))
        for folder in (_ROOT, _ROOT.parent / "protocol")
        for path in sorted(folder.rglob("*.py"))
        if list(clocks(path))
    }
    assert users == {"cache/disk/files.py": ["time"], "logs.py": ["fromtimestamp"]}


async def test_a_clock_that_jumps_by_decades_affects_only_the_log(start: SpawnModel) -> None:
    process = start(executable=FAULTY, environment={"FAULT": "clock", "OLLAMA_DEBUG": "2"})
    async with Client.of(process) as client:
        for prompt in ("Hi", "another one 0", "q" * 5000):
            request = Request(prompt, {"num_predict": 40}, intermediate_metrics=True)
            final = (await client.complete(request)).final
            assert 0 <= final.prompt_eval_duration < 60e9
            assert 0 <= final.eval_duration < 60e9
            await client.status()
        assert (await client.complete(Request("Hi"))).text == "jklmnopqrstuvwxyz"
    years = {int(year) for year in re.findall(r"^time=(\d+)-", process.output.text, re.MULTILINE)}
    assert max(years) - min(years) > 150, "the clock did jump"
    assert not process.output.captured
    assert "Traceback" not in process.output.text
    process.close()
