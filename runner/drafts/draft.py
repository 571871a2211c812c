"""What a drafter proposes."""

from typing import Literal, NamedTuple, get_args

Source = Literal["own", "earlier", "path", "model"]
"""Where a draft is from: the request's own text, the answer of an earlier request, a path of the prefix cache that
begins with all of the request's text, or a model that drafts."""
SOURCES: tuple[Source, ...] = get_args(Source)
MODEL_MATCH = 5
"""The match of a model's drafts, which have none: until there are counts, they are trusted as if so many tokens had
matched."""


class Draft(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    """At least one."""
    source: Source
    match: int
    """How many tokens right before the draft are the same where it is from."""
