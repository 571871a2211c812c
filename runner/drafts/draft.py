"""What a drafter proposes."""

from typing import Literal, NamedTuple, get_args

Source = Literal["own", "earlier", "path"]
"""Where a draft is from: the request's own text, the answer of an earlier request, or a path of the prefix cache that
begins with all of the request's text."""
SOURCES: tuple[Source, ...] = get_args(Source)


class Draft(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    """At least one."""
    source: Source
    match: int
    """How many tokens right before the draft are the same where it is from."""
