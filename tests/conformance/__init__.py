"""The conformance suite: every case of protocol.md section 9 and the facts of section 11, against any runner.

A case is an async function that takes a `Target`: a runner as one generation of hosts sees it. No pytest in here
(tests/conformance/test_conformance.py and scripts/conformance both run the same cases):

    with Stage(["path/to/runner"]) as stage:
        for case in CASES:
            for generation, part in case.parts(GENERATIONS).items():
                if part is generation:
                    print(case.number, generation.letter, await run(case, stage, generation))
"""

from tests.conformance.cases import Case, NotRunError
from tests.conformance.concurrency import CONCURRENCY
from tests.conformance.logprobs import LOGPROBS
from tests.conformance.outcome import Outcome, run
from tests.conformance.output import OUTPUT
from tests.conformance.requests import REQUESTS
from tests.conformance.sampling import SAMPLING
from tests.conformance.september import SEPTEMBER
from tests.conformance.spawn import SPAWN
from tests.conformance.stage import Stage, Target
from tests.conformance.status import STATUS
from tests.conformance.tokenize import TOKENIZE

SECTIONS = (SPAWN, STATUS, REQUESTS, OUTPUT, SAMPLING, LOGPROBS, TOKENIZE, CONCURRENCY, SEPTEMBER)
CASES = tuple(case for section in SECTIONS for case in section.cases)
"""In the order of the protocol."""

__all__ = ["CASES", "SECTIONS", "Case", "NotRunError", "Outcome", "Stage", "Target", "run"]
