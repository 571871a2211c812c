"""A runner without one of its wings: its folder is gone, and its lines where engines are built."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, Request
from tests import ROOT
from tests.process.conftest import SpawnModel

WINGS = ["kv_bits", "grammar", "drafts", "embeddings", "media", "disk", "tape", "ranks"]
BUILDERS = ("assemble.py", "build.py")
REQUESTS = [Request("Once upon a time", {"num_predict": 30}), Request("Once upon a midnight", {"num_predict": 30})]
"""The second one has a prefix in the cache."""


def only(code: Path) -> dict[str, str]:
    """The environment of a Python that imports the runner from here: not from the present directory."""
    return {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}


def without(directory: Path, wing: str) -> Path:
    """Writes the runner without this wing."""
    for package in ("protocol", "runner"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(directory / "runner" / wing)
    lines = rf"(?:    if [^\n]*:\n)? +from runner\.{wing}\.\w+ import \w+\n\n\s+[^\n]*\n"
    found = 0
    for path in (directory / "runner" / name for name in BUILDERS):
        text, count = re.subn(lines, "", path.read_text())
        path.write_text(text)
        found += count
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
    smaller = start(executable=(sys.executable, "-m", "runner"), environment=only(without(tmp_path, wing)))
    assert await answers(smaller) == await answers(start())


def checked(code: Path, kept: Path) -> dict[str, object]:
    """What `mlx-runner check` reports of the demo model."""
    words = (
        sys.executable,
        "-m",
        "runner",
        "check",
        str(ROOT / "scripts/demo_model"),
        "--json",
        f"--disk-cache={kept}",
    )
    return dict(json.loads(subprocess.run(words, env=only(code), stdout=subprocess.PIPE, check=True).stdout))


@pytest.mark.full
@pytest.mark.parametrize("wing", WINGS)
def test_check_reports_the_rest_as_before(tmp_path: Path, wing: str) -> None:
    found = checked(without(tmp_path, wing), tmp_path)
    missing = {"drafts": "drafts", "media": "pictures", "disk": "disk"}.get(wing)
    assert found == checked(ROOT, tmp_path) | ({missing: None} if missing else {})
