"""A fault in any call while answers are drafted ends at most the request that it belongs to; all later answers are
right, as in `test_any_call`."""

import random
from collections import Counter
from functools import cache

import pytest

from scripts.tools.conformance.fault_points import DRAFTED_ONLY, FATAL
from tests.lib.told_drafts import DRAFTABLE
from tests.process.faults.driven_engine import DrivenEngine
from tests.process.faults.test_any_call import (
    FEW_KINDS,
    LAYER,
    NONE,
    ROOMY,
    SINGLE,
    TIGHT,
    Injector,
    Plan,
    Setup,
    serve,
)
from tests.process.faults.test_any_line import fail_lines
from tests.process.faults.workloads import SAY_DRAFTED, sequence

pytestmark = pytest.mark.usefixtures("quiet")
SETUPS = (ROOMY, TIGHT, SINGLE, NONE)
NAMES = ("roomy", "tight", "single", "none")
SHARED = ("forward", LAYER, "evaluate", "record", "decode text", "close session", "keep")
"""Points that plain answers reach, too, at which a round is half done."""


def serve_drafted(kind: str, setup: Setup, injector: Injector) -> DrivenEngine:
    """Serves the sequence with longer answers."""
    planned = [each._replace(say=SAY_DRAFTED) for each in (*sequence(kind), *sequence(kind)[1:3])]
    return serve(kind, setup, injector, [[each] for each in planned], drafted=True)


@cache
def calls(kind: str, setup: Setup) -> Counter[str]:
    """Returns how often the sequence without a fault reaches each point."""
    injector = Injector()
    assert serve_drafted(kind, setup, injector).compared >= 50
    return injector.calls


def any_plan(point: str, kind: str, setup: Setup, chance: random.Random) -> Plan:
    """Plans a fault in a random call at this point of the sequence."""
    fault = chance.choice(("fault", "python memory", "mlx memory"))
    return Plan(point, chance.randrange(calls(kind, setup)[point]), fault, late=chance.random() < 0.4)


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("setup", SETUPS, ids=NAMES)
def test_drafted_answers_reach_every_point_of_drafts(kind: str, setup: Setup) -> None:
    assert DRAFTED_ONLY - calls(kind, setup).keys() == set()


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("point", sorted(DRAFTED_ONLY))
def test_a_fault_at_a_point_of_drafts_ends_one_request(point: str, kind: str) -> None:
    chance = random.Random(f"{point} {kind}")
    setup = chance.choice(SETUPS)
    serve_drafted(kind, setup, Injector(any_plan(point, kind, setup, chance)))


@pytest.mark.parametrize("point", SHARED)
def test_a_fault_in_the_middle_of_a_round_ends_one_request(point: str) -> None:
    chance = random.Random(point)
    kind = chance.choice(FEW_KINDS)
    serve_drafted(kind, ROOMY, Injector(any_plan(point, kind, ROOMY, chance)))


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_fault_on_a_line_ends_one_drafted_request(kind: str) -> None:
    assert len(fail_lines(kind, ROOMY, 3, random.Random(kind), serve_drafted)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=NAMES)
@pytest.mark.parametrize("kind", DRAFTABLE)
def test_a_fault_anywhere_ends_one_drafted_request(kind: str, setup: Setup) -> None:
    for point in calls(kind, setup).keys() - set(FATAL):
        serve_drafted(kind, setup, Injector(any_plan(point, kind, setup, random.Random(f"{point} {kind}"))))
    assert len(fail_lines(kind, setup, 8, random.Random(kind), serve_drafted)) > 3
