"""The times and counts of a request."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """The times and counts of a request that has begun. Times are in ns of `perf_counter_ns`; 0 means that the event
    has not happened yet. Owner: the engine thread."""

    arrived_ns: int
    started_ns: int
    """The time at which the request left the queue."""
    computed_ns: int
    """The time at which the computation began: after `started_ns` if the request waited for a prefix."""
    decoded_ns: int = 0
    """The time at which the decode of the answer began."""
    first_token_ns: int = 0
    ended_ns: int = 0
    generated: int = 0
    """The number of tokens in the answer, without the end-of-sequence token."""
    forced: int = 0
    """The generated tokens that the grammar forced."""
    known: int = 0
    """1 if the first token was known because the prompt was repeated; else 0."""
    drafted: int = 0
    """The number of drafts that were tried."""
    accepted: int = 0
    """The number of tried drafts that were right."""
    model_drafted: int = 0
    """The number of tried drafts that a model made."""
    model_accepted: int = 0
    """The number of a model's tried drafts that were right."""
    outcome: str = "done"
    """The field of `RequestCounts` that counts the request, once it has ended."""
