"""The conformance suite: every case of docs/internals/wire.md, 9, tried on any executable.

A case is an async function that takes a `Target`: a runner as one generation of hosts sees it. Neither this package nor
the host below it imports the runner, and none needs pytest: tests/tools/conformance runs the same cases.

    with Runners(["path/to/runner"]) as runners:
        for case in CASES:
            for generation, part in case.parts(GENERATIONS).items():
                if part is generation:
                    print(case.number, generation.letter, await run(case, runners, generation))

Read `cases.py` (what a case is, and how it went) and `runners.py` (processes and models) first, then one section of
cases, for example `status.py`, then `report.py` and `main.py`. `faulty.py` breaks this runner on purpose.
"""

from scripts.tools.conformance.cases import Case, Outcome, run
from scripts.tools.conformance.concurrency import CONCURRENCY
from scripts.tools.conformance.embeddings import EMBEDDINGS
from scripts.tools.conformance.later_hosts import LATER_HOSTS
from scripts.tools.conformance.new_store import NEW_STORE
from scripts.tools.conformance.output import OUTPUT
from scripts.tools.conformance.pictures import PICTURES
from scripts.tools.conformance.requests import REQUESTS
from scripts.tools.conformance.runners import NotRunError, Runners, Target
from scripts.tools.conformance.sampling import LOGPROBS, SAMPLING, TOKENIZE
from scripts.tools.conformance.scores import OTHER_ENDPOINTS
from scripts.tools.conformance.sounds import SOUNDS
from scripts.tools.conformance.spawn import SPAWN
from scripts.tools.conformance.status import STATUS

SECTIONS = (
    *(SPAWN, STATUS, REQUESTS, PICTURES, OUTPUT, SAMPLING, LOGPROBS, TOKENIZE, CONCURRENCY, LATER_HOSTS),
    *(NEW_STORE, OTHER_ENDPOINTS, EMBEDDINGS, SOUNDS),
)
CASES = tuple(case for section in SECTIONS for case in section.cases)
"""In the order of the protocol."""

__all__ = ["CASES", "SECTIONS", "Case", "NotRunError", "Outcome", "Runners", "Target", "run"]
