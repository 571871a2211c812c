"""Runs one case and says in one line how it went."""

import asyncio
import linecache
import time
import traceback
from typing import Literal, NamedTuple

from scripts.tools.conformance.cases import Case
from scripts.tools.conformance.runners import NotRunError, Runners, Target
from scripts.tools.host.lib import Generation

LIMIT_S = 60.0
SLOW_LIMIT_S = 180.0
"""For the slow cases, which wait for longer than `LIMIT_S` themselves."""
_REASON_CHARACTERS = 400

Mark = Literal["pass", "fail", "not run"]


class Outcome(NamedTuple):
    """The outcome of a case: `reason` is one line, empty for a pass; `error` is the exception, if any."""

    mark: Mark
    reason: str = ""
    seconds: float = 0.0
    error: BaseException | None = None

    @property
    def late(self) -> bool:
        """True if something did not come in time."""
        return isinstance(self.error, TimeoutError)


async def run(case: Case, runners: Runners, generation: Generation, target: Target | None = None) -> Outcome:
    """Runs a case within its time limit. It fails, too, if a shared process ends or writes what hosts take for an
    error. `target` is that of the runners and the generation unless given."""
    started = time.monotonic()
    error: BaseException | None = None
    try:
        limit_s = SLOW_LIMIT_S if case.slow else LIMIT_S
        async with asyncio.timeout(limit_s), target or Target(runners, generation) as playing:
            await case.check(playing)
    except NotRunError as excuse:
        return Outcome("not run", str(excuse), time.monotonic() - started)
    except Exception as raised:
        error = raised
    reasons = ("" if error is None else explain(error), runners.complaint())
    reason = "; ".join(filter(None, reasons))
    return Outcome("fail" if reason else "pass", reason, time.monotonic() - started, error)


def explain(error: BaseException) -> str:
    """Returns one line: the message of an assertion or else its source, the kind and text of anything else."""
    if isinstance(error, BaseExceptionGroup):
        return explain(error.exceptions[0])
    if isinstance(error, TimeoutError) and not str(error):
        text = "it took too long"
    elif isinstance(error, AssertionError):
        text = str(error) or f"this does not hold: {_source(error)}"
    else:
        text = f"{type(error).__name__}: {error}"
    line = " ".join(text.split())
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]} ..."


def _source(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = frame.lineno or 1
    last = frame.end_lineno or first
    return "".join(linecache.getline(frame.filename, number) for number in range(first, last + 1))
