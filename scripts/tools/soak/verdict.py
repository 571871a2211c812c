"""The measurements of a soak, its limits, and the failures that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from scripts.tools.soak.checker import Checker
from scripts.tools.soak.clients import Tally
from scripts.tools.soak.meter import QUICK_S, Trend
from scripts.tools.soak.subject import Limits

BEYOND = 1.05
"""The factor by which a budget for everything may be exceeded."""
CACHED_SHARE = {"trie": 0.2, "single": 0.0, "none": 0.0}
"""The share of the prompts that must come from the cache. A single entry has little to give to several clients; running
requests take much of the little that the trie may hold: 0.29 to 0.37 were seen with four clients, 0.36 with one."""
GRACE_S = 5.0
"""The seconds that hosts wait for the end."""
_GROWTH_PER_ANSWER = 10 << 10
_SLOW = 0.001  # the share of status answers that may be slow
_TIES = 0.002
_CHECKED = 0.5
_CHECKED_OF_MANY = 0.2  # with a large cache answers come quicker than a runner without one can give the right ones
_TOGETHER = 0.1  # the share of answers that must have had company
_KEPT = 2  # descriptors: of connections that are about to close


@dataclass
class Soaked:
    """Everything that was measured. `own` are the `latencies` without the time that the machine was busy with other
    processes; trends are None with too few samples; `concurrent` is True if several answers may be written at once;
    `descriptors` are those before and after, without any client, or None where the system does not tell; `budget` is
    the memory allowed for everything and `peak` the most in use, None without a budget; `exit_s` is None if the process
    had to be killed."""

    cache: str
    concurrent: bool
    tally: Tally
    checker: Checker
    latencies: Sequence[float]
    own: Sequence[float]
    rss: Trend | None
    memory: Trend | None
    most_memory: int
    weights: int
    limits: Limits
    budget: int | None
    peak: int | None
    descriptors: tuple[int | None, int | None]
    captured: str
    faults: Sequence[str]
    exit_s: float | None

    @property
    def failures(self) -> list[str]:
        return [*self.faults_beside_time, *self._latency()]

    @property
    def faults_beside_time(self) -> list[str]:
        """The failures without those of a slow or busy machine."""
        return [*self.faults, *self.tally.faults, *self._answers(), *self._memory(), *self._end()]

    def _answers(self) -> list[str]:
        tally, checker = self.tally, self.checker
        found = [f"wrong answer: {text}" for text in checker.wrong]
        share = _CHECKED if self.budget is None else _CHECKED_OF_MANY
        if checker.checked < max(share * tally.answers, 1):
            found.append(f"only {checker.checked} of {tally.answers} answers were checked")
        if checker.ties > 1 + _TIES * checker.checked:
            found.append(f"{checker.ties} of {checker.checked} answers left the right one at a tie")
        if self._cached < CACHED_SHARE[self.cache]:
            found.append(f"only {self._cached:.1%} of the prompts came from the cache")
        if self.concurrent and tally.together < _TOGETHER * tally.answers:
            found.append(f"only {tally.together} of {tally.answers} answers overlapped another one")
        return found

    def _latency(self) -> list[str]:
        if not self.latencies:
            return ["no status was answered"]
        found = []
        if _slow(self.own) > 1 + _SLOW * len(self.own):
            found.append(f"{_slow(self.own)} of {len(self.own)} status answers took longer than {QUICK_S * 1e3:.0f} ms")
        if median(self.latencies) > QUICK_S:
            found.append(f"a status took {median(self.latencies) * 1e3:.0f} ms in the median")
        return found

    def _memory(self) -> list[str]:
        if self.rss is None or self.memory is None:
            return [f"too few samples of memory for {self.tally.answers} answers"]
        found = []
        for name, trend in (("resident memory", self.rss), ("MLX's memory", self.memory)):
            if self.budget is None and trend.growth > self.limits.growth + _GROWTH_PER_ANSWER * trend.answers:
                found.append(
                    f"{name} grew from {_mib(trend.warm)} to {_mib(trend.late)} over {trend.answers:.0f} answers"
                )
        if self.budget is not None:
            most = max(self.most_memory, self.peak or 0)
            if most > self.budget * BEYOND:
                found.append(f"MLX held {_mib(most)} where {_mib(self.budget)} were allowed")
        elif self.most_memory > self.weights + self.limits.cache + self.limits.workspace:
            found.append(f"MLX held {_mib(self.most_memory)} with {_mib(self.weights)} of weights")
        return found

    def _end(self) -> list[str]:
        found = []
        before, after = self.descriptors
        if before is not None and (after is None or after > before + _KEPT):
            found.append(f"{after} descriptors are open where there were {before}")
        if self.captured:
            found.append(f"a host would take this for an error: {self.captured!r}")
        if self.exit_s is None:
            found.append(f"it had not ended {GRACE_S:.0f} s after the signal")
        return found

    @property
    def _cached(self) -> float:
        return self.tally.cached_tokens / max(self.tally.prompt_tokens, 1)

    def table(self) -> str:
        tally, checker = self.tally, self.checker
        rows = {
            "answers": f"{tally.answers}, {checker.checked} of them checked, {len(checker.wrong)} wrong,"
            f" {checker.ties} ties",
            "together": f"{tally.together} answers overlapped another one",
            "prompts": f"{tally.prompt_tokens} tokens, {self._cached:.1%} from the cache",
            "actions": ", ".join(f"{name} {count}" for name, count in tally.done.most_common()),
            "status": _latencies(self.latencies, self.own),
            "resident": _trend(self.rss),
            "MLX memory": f"{_trend(self.memory)}, at most {_mib(self.most_memory)}{self._of_budget}",
            "descriptors": "{} before, {} after".format(*self.descriptors),
            "output": f"{len(self.captured.splitlines())} lines that a host would take for an error",
            "end": "killed" if self.exit_s is None else f"{self.exit_s:.2f} s after the signal",
        }
        return "\n".join(f"  {name:<12} {text}" for name, text in rows.items())

    @property
    def _of_budget(self) -> str:
        if self.budget is None or self.peak is None:
            return ""
        return f", {_mib(self.peak)} at its peak, of {_mib(self.budget)}"


def _slow(latencies: Sequence[float]) -> int:
    return sum(latency > QUICK_S for latency in latencies)


def _latencies(latencies: Sequence[float], own: Sequence[float]) -> str:
    if len(latencies) < 2:
        return f"{len(latencies)} answered"
    cuts = quantiles(latencies, n=1000)
    return (
        f"{len(latencies)} asked, median {cuts[499] * 1e3:.1f} ms, 99 % {cuts[989] * 1e3:.1f} ms, longest"
        f" {max(latencies) * 1e3:.0f} ms, {_slow(latencies)} over {QUICK_S * 1e3:.0f} ms ({_slow(own)} if"
        " waits for a core do not count)"
    )


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _trend(trend: Trend | None) -> str:
    if trend is None:
        return "too few samples"
    each = trend.growth / trend.answers
    return f"{_mib(trend.warm)} when warm, {_mib(trend.late)} at the end, {each:.0f} bytes an answer"
