"""Every case of the protocol against a runner of two ranks, as hosts of one generation ask it."""

from collections.abc import Iterator

import pytest

from scripts.tools.conformance import CASES, Case, Runners, run
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib.generations import G

pytestmark = pytest.mark.slow
OTHERWISE = ("32-sound-refused", "32-damaged-picture", "33-image-tags", "33-told-apart", "33-cached", "51-failure")
"""Several ranks answer otherwise: a model that sees reads text alone, and a failure ends all ranks."""
ASKED = [case for case in CASES if case.id not in OTHERWISE and case.parts([G]).get(G) is G]


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    with Runners(RUNNER, environment={"MLX_RUNNER_RANKS": "2"}, key_heads=2) as runners:
        yield runners


@pytest.mark.parametrize("case", ASKED, ids=lambda case: case.id)
async def test_case(case: Case, runners: Runners) -> None:
    outcome = await run(case, runners, G)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.mark == "pass", outcome.reason
