"""Damaged pictures of every form, in a process with limited memory: read, or refused with the text of a 400."""

import subprocess
import sys

import pytest

from tests import ROOT
from tests.unit.media.pictures import FORMS


def check(form: str, count: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.unit.media.fuzzing", form, str(count), str(seed)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, ""), f"{run.returncode}: {run.stderr[-2000:]}"
    assert " refused" in run.stdout


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_picture_is_read_or_refused(form: str) -> None:
    check(form, 60, 1)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_many_damaged_pictures_are_read_or_refused(form: str) -> None:
    check(form, 3000, 2)
