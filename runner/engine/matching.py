"""Who decodes with whom."""

from collections.abc import Callable, Sequence

from runner.cache import PrefixCache
from runner.engine.group import Group
from runner.logs import Log, told

log = Log(__name__)
_LONE_STEPS = 4  # joining copies all that a row holds, which is no good for answers that are over then


class Matching:
    """Finds the group that another one should join. Owner: the engine thread."""

    def __init__(self, find_fault: Callable[[], str]) -> None:
        """`find_fault` is asked once, when it first matters: it takes some forwards."""
        self._find_fault = find_fault
        self.lone_steps = _LONE_STEPS
        """After how many steps alone a group may join another one."""
        self._fault: str | None = None  # why nobody decodes together; None: not known yet

    def host(self, group: Group, groups: Sequence[Group], cache: PrefixCache) -> Group | None:
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
        if self._fault is None:
            try:
                self._fault = self._find_fault()
            except Exception as error:  # whatever a model makes of a trial
                self._fault = told(error)
            if self._fault:
                log.info("answers are computed in turns, not together", why=self._fault)
        return not self._fault
