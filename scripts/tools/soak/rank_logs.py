"""The logs of a runner of several ranks: each rank says the same of every request."""

import re
from collections.abc import Sequence

COUNTS = (
    "outcome",
    "total",
    "matched",
    "cached",
    "left",
    "evicted_bytes",
    "generated",
    "forced",
    "drafted",
    "accepted",
)
"""The fields of a request's line that all ranks have."""


def completions(lines: Sequence[str], rank: int = 0) -> dict[str, dict[str, str]]:
    """Returns the counts that the log of a rank has of each request that has ended, by the request's number."""
    found = {}
    for line in lines:
        if "msg=completion" in line:
            fields = dict(re.findall(r" (\w+)=(\S+)", line))
            if int(fields.get("rank", 0)) == rank:
                found[fields["request"]] = {name: fields[name] for name in COUNTS if name in fields}
    return found


def rank_faults(lines: Sequence[str], ranks: int) -> list[str]:
    """Returns a text for each follower whose log differs from the leader's, with the first request that does."""
    own = completions(lines)
    faults = []
    for rank in range(1, ranks):
        other = completions(lines, rank)
        if differing := [number for number in {**own, **other} if own.get(number) != other.get(number)]:
            first = differing[0]
            faults.append(
                f"the logs of ranks 0 and {rank} differ in {len(differing)} of {len(own)} requests; request {first}:"
                f" {own.get(first)} and {other.get(first)}"
            )
    return faults
