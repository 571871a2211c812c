"""`POST /v1/score`: the likelihood of each candidate as the next token of a prompt, for many prompts at once."""

import msgspec

from protocol.refusal import BadRequestError, decoded
from protocol.request import Media

MOST_ROWS, MOST_CANDIDATES = 64, 26
MOST_TEXT_BYTES = 5 << 20
"""The most bytes of a request without its media: 64 rows of 64 KiB, the limit of hosts, and the JSON around them."""
MOST_MEDIA_BYTES = 32 << 20
"""The most bytes of its media, in base64."""
_MOST_MEDIA = 1 << 10


class Row(msgspec.Struct, frozen=True, gc=False):
    """A prompt, and the candidates for its next token. (Without `gc=False` a million rows would take Python's garbage
    collector a second.)"""

    prompt: str = ""
    candidates: tuple[str, ...] = ()


class ScoreRequest(msgspec.Struct):
    """The body of a request. Other keys, for models with heads of their own, are ignored."""

    max_tokens: int
    """The most tokens of a row."""
    rows: list[Row]
    media: list[Media]
    """For the markers `[img-ID]` of all prompts."""


Span = tuple[int, int]


class Question(msgspec.Struct, frozen=True, gc=False):
    """A question about the state, in words."""

    type: str = ""
    instructions: str = ""
    options: tuple[str, ...] = ()


class QuestionRow(msgspec.Struct, frozen=True, gc=False):
    """A row of a model that reads questions."""

    question: Question | None = None


class Field(msgspec.Struct, frozen=True, gc=False):
    """A question as spans of segments, their ends exclusive."""

    type: int = -1
    question: Span = (0, 0)
    options: tuple[Span, ...] = ()


class DecisionRequest(msgspec.Struct, frozen=True):
    """The body of a request to a model with a head of its own: `rows` and `state`, or `segments` and `fields`."""

    max_tokens: int = 0
    rows: tuple[QuestionRow, ...] = ()
    state: str = ""
    segments: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    images: tuple[str, ...] = ()


_DECISION = msgspec.json.Decoder(DecisionRequest)


class _Body(msgspec.Struct):
    max_tokens: int = 0
    rows: msgspec.Raw = msgspec.Raw(b"[]")
    media: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"[]"), name="Media")


_BODY = msgspec.json.Decoder(_Body)
_ROWS = msgspec.json.Decoder(list[Row])
_MEDIA = msgspec.json.Decoder(list[Media])


class _Scores(msgspec.Struct, frozen=True, omit_defaults=True):
    logits: list[list[float]]
    input_tokens: int
    cached_tokens: int | None = None


def decode_score(body: bytes) -> ScoreRequest:
    """Returns the request in a body. Raises BadRequestError.

    Keys must have the case that hosts write: matching any case, as Go does, takes ten times as long. Lists that are too
    long are refused unread.
    """
    parts = decoded(_BODY, body)
    rows, media = bytes(parts.rows), bytes(parts.media)
    if len(rows) > MOST_TEXT_BYTES or media.count(b"{") > _MOST_MEDIA:
        raise BadRequestError(f"more than {MOST_TEXT_BYTES} bytes of rows, or more than {_MOST_MEDIA} media")
    return ScoreRequest(parts.max_tokens, decoded(_ROWS, rows, "rows"), decoded(_MEDIA, media, "Media"))


def decode_decision(body: bytes) -> DecisionRequest:
    """Returns the request in a body. Raises BadRequestError."""
    return decoded(_DECISION, body)


def score_body(logits: list[list[float]], input_tokens: int, cached_tokens: int | None) -> bytes:
    """Returns the answer: a logit for each candidate of each row (any common offset of a row will do), the number of
    tokens of all rows, and the number of these that were cached; None without a cache."""
    return msgspec.json.encode(_Scores(logits, input_tokens, cached_tokens)) + b"\n"
