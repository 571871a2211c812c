"""Who decodes with whom."""

from collections.abc import Sequence

from runner.cache import CacheBudget
from runner.engine.batch import Batch
from runner.engine.context import BatchTrial
from runner.engine.trace import TRACE
from runner.logs import Log

log = Log(__name__)
_LONE_STEPS = 4  # joining copies all that a row holds, which is no good for answers that are over then


class BatchMatcher:
    """Finds the group that another one should join. Owner: the engine thread."""

    def __init__(self, trial: BatchTrial) -> None:
        """Nobody joins anybody before the end of the `trial`, which somebody has to advance."""
        self._trial = trial
        self.lone_steps = _LONE_STEPS
        """After how many steps alone a group may join another one."""
        self.waits = False
        """Whether a group would have joined another one if the trial were over."""
        self._told = False

    @property
    def untried(self) -> bool:
        """Whether the trial is not over."""
        return self._trial.fault is None

    def advance(self) -> None:
        """One slice of the trial."""
        TRACE.name("trial")
        self._trial.advance()
        self.waits &= self.untried

    def host(self, group: Batch, groups: Sequence[Batch], cache: CacheBudget) -> Batch | None:
        """Of `groups`, the one that the one generation of `group` goes best with and that has room for it."""
        if len(groups) < 2 or group.steps < self.lone_steps:
            return None
        hosts = [other for other in groups if other is not group and other.accepts(group)]
        if not hosts or not self._may_join() or not group.batchable:
            return None
        host = max(hosts, key=lambda other: len(other.generations))
        rows = len(host.generations) + 1
        room = cache.allows(cache.session_bytes(host.padded(group)) * rows - host.nbytes)
        return host if room else None

    def _may_join(self) -> bool:
        fault = self._trial.fault
        self.waits = fault is None
        if fault and not self._told:
            self._told = True
            log.info("answers are computed in turns, not together", why=fault)
        return fault == ""
