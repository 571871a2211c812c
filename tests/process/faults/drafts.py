"""Drafts for the sweeps of faults: from known text as ever, else two right tokens and a wrong one."""

from collections.abc import Sequence

from runner.cache.session import LiveSession
from runner.drafts.draft import Draft
from runner.engine.drafting import AnswerDrafter, Drafting
from runner.engine.scheduler import Scheduler
from runner.engine.trial import SettledTrial
from scripts.tools.models.tiny import VOCAB
from tests.process.faults.workloads import SAY_DRAFTED, expected, tokens_of

_RIGHT = 2


class SweptDrafter(AnswerDrafter):
    """Drafts at every step."""

    def __init__(self, shared: Drafting, prompt: Sequence[int], kind: str) -> None:
        super().__init__(shared, prompt)
        self._start = len(prompt)
        self._answer = tokens_of(expected(kind, tuple(prompt), SAY_DRAFTED).text)

    def _choose(self, session: LiveSession, most: int) -> Draft | None:
        return super()._choose(session, most) or self._told(len(session.recorded) - self._start, most)

    def _told(self, at: int, most: int) -> Draft | None:
        coming = self._answer[at : at + _RIGHT + 1]
        drafts = [*coming[:_RIGHT], *((token + 1) % VOCAB for token in coming[_RIGHT:])][:most]
        if not drafts:
            return None
        draft = Draft(drafts, "own", _RIGHT)
        self._shared.policy.length(draft, self._start + at)  # it learns from drafts that it was asked about
        return draft


def draft_always(scheduler: Scheduler, kind: str) -> None:
    """Lets an engine draft at every step, from the first one on, however little memory there is."""
    scheduler.memory.allows_drafts = lambda cache: True  # type: ignore[method-assign]
    drafting = scheduler.drafting
    assert isinstance(drafting, Drafting)
    drafting._trial = SettledTrial()
    drafting.guard.allows = lambda: True  # type: ignore[method-assign]  # however slow
    drafting.drafter = lambda prompt: SweptDrafter(drafting, prompt, kind)  # type: ignore[method-assign]
