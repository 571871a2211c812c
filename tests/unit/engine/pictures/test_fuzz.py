"""Damaged pictures of every form on the way of a request, in a process with limited memory: taken, or refused."""

import re
import resource
import subprocess
import sys

import pytest

from tests import ROOT
from tests.unit.media.pictures import FORMS


def check(form: str, count: int, seed: int) -> None:
    """Checks that a process took or refused all, in bounded time: at most a second of its processor for ten files."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "tests.unit.engine.pictures.fuzzing", form, str(count), str(seed)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (run.returncode, run.stderr) == (0, ""), f"{run.returncode}: {run.stderr[-2000:]}"
    numbers = re.fullmatch(rf"{form}: (\d+) taken, (\d+) refused\n", run.stdout)
    assert numbers is not None
    taken, refused = map(int, numbers.groups())
    assert taken > 0 < refused
    assert taken + refused > 2 * count
    assert after.ru_utime - before.ru_utime < 10 + (taken + refused) / 10


@pytest.mark.parametrize("form", FORMS)
def test_a_request_with_a_damaged_picture_is_taken_or_refused(form: str) -> None:
    check(form, 40, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 7))
@pytest.mark.parametrize("form", FORMS)
def test_no_end_of_requests_with_damaged_pictures(form: str, seed: int) -> None:
    check(form, 5000, seed)
