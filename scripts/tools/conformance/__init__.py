"""The conformance suite: every case of docs/internals/wire.md, 9 and 11, against any runner.

A case is an async function that takes a `Target`: a runner as one generation of hosts sees it. No pytest in here
(tests/tools/conformance/test_conformance.py and scripts/conformance both run the same cases):

    with Stage(["path/to/runner"]) as stage:
        for case in CASES:
            for generation, part in case.parts(GENERATIONS).items():
                if part is generation:
                    print(case.number, generation.letter, await run(case, stage, generation))
"""

from scripts.tools.conformance.cases import Case, NotRunError
from scripts.tools.conformance.concurrency import CONCURRENCY
from scripts.tools.conformance.logprobs import LOGPROBS
from scripts.tools.conformance.outcome import Outcome, run
from scripts.tools.conformance.output import OUTPUT
from scripts.tools.conformance.requests import REQUESTS
from scripts.tools.conformance.sampling import SAMPLING
from scripts.tools.conformance.september import SEPTEMBER
from scripts.tools.conformance.spawn import SPAWN
from scripts.tools.conformance.stage import Stage, Target
from scripts.tools.conformance.status import STATUS
from scripts.tools.conformance.tokenize import TOKENIZE

SECTIONS = (SPAWN, STATUS, REQUESTS, OUTPUT, SAMPLING, LOGPROBS, TOKENIZE, CONCURRENCY, SEPTEMBER)
CASES = tuple(case for section in SECTIONS for case in section.cases)
"""In the order of the protocol."""

__all__ = ["CASES", "SECTIONS", "Case", "NotRunError", "Outcome", "Stage", "Target", "run"]
