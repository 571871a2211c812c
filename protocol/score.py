"""`POST /v1/score`: the probability of each candidate as the next token of a prompt. One request has many prompts."""

import msgspec

from protocol.refusal import BadRequestError, decoded
from protocol.request import Media

MOST_ROWS, MOST_CANDIDATES = 64, 26
MOST_TEXT_BYTES = 5 << 20
"""The most bytes of a request without media: 64 rows of 64 KiB (the limit of hosts), and the JSON around them."""
MOST_MEDIA_BYTES = 32 << 20
"""The most bytes of the media of a request, in base64."""
_MOST_MEDIA = 1 << 10


class Row(msgspec.Struct, frozen=True, gc=False):
    """A prompt, and the candidates for the token after it. (Without `gc=False`, Python's garbage collector would need a
    second for a million rows.)"""

    prompt: str = ""
    candidates: tuple[str, ...] = ()


class ScoreRequest(msgspec.Struct):
    """The body of a request to a model that makes text. Keys that only `DecisionRequest` has are ignored."""

    max_tokens: int
    """The most tokens that the prompt of a row may have."""
    rows: list[Row]
    media: list[Media]
    """The media that the markers `[img-ID]` in the prompts name."""


Span = tuple[int, int]


class Question(msgspec.Struct, frozen=True, gc=False):
    """A question about `DecisionRequest.state`, as text."""

    type: str = ""
    instructions: str = ""
    options: tuple[str, ...] = ()


class QuestionRow(msgspec.Struct, frozen=True, gc=False):
    """A row of a `DecisionRequest`."""

    question: Question | None = None


class Field(msgspec.Struct, frozen=True, gc=False):
    """A question as spans of `DecisionRequest.segments`. The end of a span is exclusive."""

    type: int = -1
    question: Span = (0, 0)
    options: tuple[Span, ...] = ()


class DecisionRequest(msgspec.Struct, frozen=True):
    """The body for a model with a head for decisions: `rows` and `state`, or `segments` and `fields`."""

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

    Keys must be in the case that hosts write: to match any case, as Go does, would take ten times as long. Lists that
    are too long are refused before they are decoded.
    """
    parts = decoded(_BODY, body)
    rows, media = bytes(parts.rows), bytes(parts.media)
    if len(rows) > MOST_TEXT_BYTES or media.count(b"{") > _MOST_MEDIA:
        raise BadRequestError(f"more than {MOST_TEXT_BYTES} bytes of rows, or more than {_MOST_MEDIA} media")
    return ScoreRequest(parts.max_tokens, decoded(_ROWS, rows, "rows"), decoded(_MEDIA, media, "Media"))


def decode_decision(body: bytes) -> DecisionRequest:
    """Returns the request in a body. Raises BadRequestError for an invalid body."""
    return decoded(_DECISION, body)


def score_body(logits: list[list[float]], input_tokens: int, cached_tokens: int | None) -> bytes:
    """Returns the body of the response: a logit for each candidate of each row (up to a constant for each row), the
    tokens of all rows, and the cached tokens among them, None without a cache."""
    return msgspec.json.encode(_Scores(logits, input_tokens, cached_tokens)) + b"\n"
