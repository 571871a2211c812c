"""Chooses the batches that decode together."""

from collections.abc import Sequence

from runner.cache import CacheBudget
from runner.engine.batch import Batch
from runner.engine.observe.trace import TRACE
from runner.engine.trial import Trial
from runner.logs import Log

log = Log(__name__)
_LONE_STEPS = 4  # joining copies all that a row holds, which does not pay for answers that end soon


class BatchMatcher:
    """Finds the batch that a batch of one should join. Owner: the engine thread."""

    def __init__(self, trial: Trial) -> None:
        """No batch joins another one before the end of the `trial`, which the caller advances."""
        self._trial = trial
        self.lone_steps = _LONE_STEPS
        """The number of steps that a batch takes alone before it may join another one."""
        self.waits = False
        """True if a batch would have joined another one if the trial were over."""
        self._logged = False

    @property
    def untried(self) -> bool:
        """True until the trial is over."""
        return self._trial.fault is None

    def advance(self) -> None:
        """Runs one slice of the trial."""
        TRACE.name("trial")
        self._trial.advance()
        self.waits &= self.untried

    def find(self, batch: Batch, batches: Sequence[Batch], cache: CacheBudget) -> Batch | None:
        """Returns the largest of `batches` that the one generation of `batch` can join and that has room for it."""
        if len(batches) < 2 or batch.steps < self.lone_steps:
            return None
        targets = [other for other in batches if other is not batch and other.accepts(batch)]
        if not targets or not self._may_join() or not batch.batchable:
            return None
        target = max(targets, key=lambda other: len(other.generations))
        rows = len(target.generations) + 1
        room = cache.allows(cache.session_bytes(target.padded(batch)) * rows - target.nbytes)
        return target if room else None

    def _may_join(self) -> bool:
        fault = self._trial.fault
        self.waits = fault is None
        if fault and not self._logged:
            self._logged = True
            log.info("answers are computed in turns, not together", why=fault)
        return fault == ""
