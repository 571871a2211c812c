"""A runner without one of its wings: its folder is gone, and its line in the table of wings."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner.wings import WINGS as TABLE
from scripts.tools.host.lib import Client, Process, Request
from tests import ROOT
from tests.process.conftest import SpawnModel

WINGS = [entry.folder for entry in TABLE]
REQUESTS = [Request("Once upon a time", {"num_predict": 30}), Request("Once upon a midnight", {"num_predict": 30})]
"""The second one has a prefix in the cache."""


RUNNER = (
    sys.executable,
    "-c",
    "import runpy, sys; "
    "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in getattr(each, '__module__', '')]; "
    "runpy.run_module('runner', run_name='__main__', alter_sys=True)",
)
"""Of the path alone: an editable install would find in the checkout whatever the path does not have."""


def only(code: Path) -> dict[str, str]:
    """The environment of a Python that imports the runner from here: not from the present directory."""
    return {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}


def without(directory: Path, wing: str) -> Path:
    """Writes the runner without this wing."""
    for package in ("protocol", "runner"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(directory / "runner" / wing)
    table = directory / "runner" / "wings.py"
    text, found = re.subn(rf'    Entry\("{wing}".*\n', "", table.read_text())
    table.write_text(text)
    assert found == 1, "a wing is named once"
    return directory


async def answers(process: Process) -> list[tuple[str, int | None]]:
    async with Client.of(process) as client:
        found = [await client.complete(request) for request in REQUESTS]
    return [(each.text, each.final.prompt_eval_cached_count) for each in found]


@pytest.mark.full
@pytest.mark.parametrize("wing", WINGS)
async def test_the_rest_answers_as_before(start: SpawnModel, tmp_path: Path, wing: str) -> None:
    """Texts and cached counts are equal."""
    smaller = start(executable=RUNNER, environment=only(without(tmp_path, wing)))
    assert await answers(smaller) == await answers(start())


@pytest.mark.full
async def test_without_the_numbers_their_endpoints_are_not_there(start: SpawnModel, tmp_path: Path) -> None:
    code = without(tmp_path, "numbers")
    process = start(executable=RUNNER, environment=only(code))
    async with Client.of(process) as client:
        for path, status in (("/v1/status", 200), ("/health", 200), ("/v1/stats", 404), ("/metrics", 404), ("/", 404)):
            assert (await client.send("GET", path)).status == status


def checked(code: Path, kept: Path) -> dict[str, object]:
    """Returns the report of `mlx-runner check` about the demo model."""
    words = (*RUNNER, "check", str(ROOT / "scripts/demo_model"), "--json", f"--disk-cache={kept}")
    return dict(json.loads(subprocess.run(words, env=only(code), stdout=subprocess.PIPE, check=True).stdout))


@pytest.mark.full
@pytest.mark.parametrize("wing", WINGS)
def test_check_reports_the_rest_as_before(tmp_path: Path, wing: str) -> None:
    found = checked(without(tmp_path, wing), tmp_path)
    missing = {"drafts": "drafts", "media": "pictures", "disk": "disk", "ranks": "ranks"}.get(wing)
    assert found == checked(ROOT, tmp_path) | ({missing: None} if missing else {})
