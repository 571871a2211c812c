"""`POST /v1/score`: how likely each candidate is to be the next token after a prompt, for many prompts at once."""

import msgspec

from protocol.golang import BadRequestError

MOST_ROWS, MOST_CANDIDATES = 64, 26


class Row(msgspec.Struct, frozen=True, gc=False):
    """A prompt, and the texts that may follow it, each of one token. (A million of them would keep Python's garbage
    collector busy for a second.)"""

    prompt: str = ""
    candidates: tuple[str, ...] = ()


class ScoreRequest(msgspec.Struct):
    """The body of a request. Other keys, for models with heads of their own, are ignored."""

    max_tokens: int = 0
    """The most tokens of a row."""
    rows: list[Row] = []


_DECODER = msgspec.json.Decoder(ScoreRequest)


class _Scores(msgspec.Struct, frozen=True):
    logits: list[list[float]]
    input_tokens: int
    cached_tokens: int


def decode_score(body: bytes) -> ScoreRequest:
    """Returns the request in a body. Raises BadRequestError.

    Keys are taken as hosts write them: reading them in any case, as Go does, takes ten times as long.
    """
    try:
        return _DECODER.decode(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(str(error)) from None


def score_body(logits: list[list[float]], input_tokens: int, cached_tokens: int) -> bytes:
    """Returns the answer: a logit of each candidate of each row (here a log-probability: an offset that is common to
    a row does not matter), the tokens of all rows, and those of them that a cache held."""
    return msgspec.json.encode(_Scores(logits, input_tokens, cached_tokens)) + b"\n"
