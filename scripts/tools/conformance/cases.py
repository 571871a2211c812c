"""A case: one thing that must hold, the generations of hosts it applies to, and those that need a run of their own."""

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scripts.tools.conformance.runners import Target
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
    """Of docs/internals/wire.md, 9, or 11.n for the n-th fact of its section 11."""
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
        self,
        number: int | str,
        name: str,
        per: Per,
        *needs: Need,
        slow: bool = False,
        beyond: bool = False,
    ) -> Callable[[Check], Check]:
        """Adds the decorated function, whose docstring says in one line what must hold."""

        def register(check: Check) -> Check:
            title = (check.__doc__ or "").strip()
            self.cases.append(Case(str(number), name, title, check, per, needs, slow, beyond))
            return check

        return register
