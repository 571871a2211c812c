"""The lifecycle of a request: its times and counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """The times and counts of a request that has begun, in ns of `perf_counter_ns`, 0 for what has not happened yet.
    Owner: the engine thread."""

    arrived_ns: int
    started_ns: int
    """It left the queue."""
    computed_ns: int
    """Its computation began: later than `started_ns` if it had to wait for a prefix that another request computed."""
    decoded_ns: int = 0
    """The decode of its answer began."""
    first_token_ns: int = 0
    ended_ns: int = 0
    generated: int = 0
    """Tokens of the answer, the end-of-sequence token excluded."""
    forced: int = 0
    """The number of them that the grammar forced."""
    known: int = 0
    """1 if the first token was known, as after a repeated prompt; else 0."""
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
