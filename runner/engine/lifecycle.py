"""The lifecycle of a request: its times and counts."""

from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

from protocol import Metrics

if TYPE_CHECKING:
    from runner.cache.session import Session
    from runner.engine.request import Request


@dataclass(slots=True)
class Lifecycle:
    """The times and counts of a request that has begun, in ns of `perf_counter_ns`, 0 for what has not happened yet.
    Owner: the engine thread."""

    arrived_ns: int
    started_ns: int
    """It left the queue."""
    computed_ns: int
    """Its computation began: later than that if it had to wait for a prefix that another request computed."""
    decoded_ns: int = 0
    """The decode of its answer began."""
    first_token_ns: int = 0
    ended_ns: int = 0
    generated: int = 0
    """Tokens of the answer, the end-of-sequence token excluded."""
    forced: int = 0
    """The number of them that the grammar forced."""
    known: int = 0
    """1 if the first of them was known, as that of a repeated prompt."""
    drafted: int = 0
    """Drafts that were tried."""
    accepted: int = 0
    """The number of them that were right."""
    model_drafted: int = 0
    """Those of the drafts that a model made."""
    model_accepted: int = 0
    """The number of them that were right."""
    outcome: str = "done"
    """A field of `RequestCounts`, once it has ended."""

    def metrics(self, total: int, cached: int) -> Metrics:
        """Returns the counters so far, in tokens and ns. `cached` of the `total` tokens of the prompt came from the
        cache."""
        now = self.ended_ns or perf_counter_ns()
        decoded = self.decoded_ns or now
        return Metrics(
            prompt_eval_count=total,
            prompt_eval_cached_count=cached,
            prompt_eval_duration=decoded - self.started_ns,
            eval_count=self.generated,
            eval_duration=now - decoded,
        )

    @property
    def ttft_s(self) -> float:
        """The seconds from the arrival to the first token, or to the end."""
        return ((self.first_token_ns or self.ended_ns) - self.arrived_ns) / 1e9

    @property
    def waited_s(self) -> float:
        """The seconds from the arrival to the start of the computation."""
        return (self.computed_ns - self.arrived_ns) / 1e9

    @property
    def tokens_per_s(self) -> float:
        """The decode rate, from the first token on; 0 with fewer than two tokens."""
        if self.generated < 2:
            return 0.0
        return (self.generated - 1) / (max(1, self.ended_ns - self.first_token_ns) / 1e9)

    def prefill_tokens_per_s(self, tokens: int) -> float:
        """Returns the rate of a prefill that computed `tokens`; 0 unless it has ended."""
        return tokens / (max(1, self.decoded_ns - self.computed_ns) / 1e9) if self.decoded_ns else 0.0


def restored(request: "Request", session: "Session") -> int:
    """Returns the number of the cached tokens of a request that were brought from disk for it."""
    return min(request.restored, session.cached)
