"""A case: one thing that must hold, the generations of hosts it applies to, and those that need a run of their own."""

import asyncio
import linecache
import time
import traceback
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scripts.tools.conformance.runners import NotRunError, Runners, Target
from scripts.tools.host.lib import Generation

Check = Callable[[Target], Awaitable[None]]
Per = Callable[[Generation], Hashable]
"""Generations for which this is equal see no difference in the case; one run speaks for all of them."""


class Need(NamedTuple):
    """A requirement on a generation for a case to apply to it, and the reason where it is not met."""

    met: Callable[[Generation], bool]
    otherwise: str


def sends(*options: str) -> Need:
    """Requires that the host passes these options on."""
    return Need(lambda generation: set(options) <= set(generation.option_keys), f"the host sends no {options[-1]}")


def asks(key: str) -> Need:
    """Requires that the host's requests have this top-level key."""
    return Need(lambda generation: key in generation.request_keys, f"the host sends no {key}")


def reads(key: str) -> Need:
    """Requires that the host reads this key of an answer."""
    return Need(lambda generation: key in generation.answer_keys, f"the host reads no {key}")


def once(generation: Generation) -> Hashable:
    """Returns None: nothing in the case depends on the host (raw requests, or the handling of connections)."""
    return None


def argv(generation: Generation) -> Hashable:
    """Returns the arguments of the process."""
    return tuple(generation.argv("model", 1))


def ready(generation: Generation) -> Hashable:
    """Returns the arguments of the process, and the check that finds it ready."""
    return argv(generation), generation.ready_path, generation.ready_decodes


def life(generation: Generation) -> Hashable:
    """Returns the arguments of the process, the check that finds it ready, and the way it is closed."""
    return ready(generation), generation.close_grace_s


def told(generation: Generation) -> Hashable:
    """Returns the arguments of the process, and the rule by which the host reads its output."""
    return argv(generation), generation.rule


def wire(generation: Generation) -> Hashable:
    """Returns the keys that are sent and read."""
    answer_keys = tuple(sorted(generation.answer_keys.items()))
    return generation.request_keys, generation.option_keys, answer_keys, generation.format


@dataclass(frozen=True)
class Case:
    """One thing that must hold. A number of the protocol may have several, told apart by their names."""

    number: str
    """Of docs/internals/wire.md, 9; a range if it has several."""
    name: str
    title: str
    check: Check
    per: Per
    needs: tuple[Need, ...] = ()
    slow: bool = False
    beyond: bool = False
    """True if it asks for more than Ollama's own runner does; a runner that does no more has not failed."""

    @property
    def id(self) -> str:
        return f"{self.number}-{self.name}"

    def excuse(self, generation: Generation) -> str:
        """Returns the reason why the case does not apply to this generation; "" if it applies."""
        return next((need.otherwise for need in self.needs if not need.met(generation)), "")

    def parts(self, generations: Sequence[Generation]) -> dict[Generation, Generation | str]:
        """For each generation the one whose run speaks for it (itself, or a later one that sees no difference), or
        the reason why the case does not apply."""
        newest = {self.per(generation): generation for generation in generations if not self.excuse(generation)}
        return {generation: self.excuse(generation) or newest[self.per(generation)] for generation in generations}


class Section:
    """A heading of the protocol's list, and the cases under it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def case(
        self, number: int | str, name: str, per: Per, *needs: Need, slow: bool = False, beyond: bool = False
    ) -> Callable[[Check], Check]:
        """Adds the decorated function, whose docstring says in one line what must hold."""

        def register(check: Check) -> Check:
            title = (check.__doc__ or "").strip()
            self.cases.append(Case(str(number), name, title, check, per, needs, slow, beyond))
            return check

        return register


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
