"""The lines of a completion stream. Each line is one JSON object, in a form that hosts of every generation can read.

Hosts ignore the case of keys but not underscores. Older and newer hosts spell the keys of the last line differently, so
that line has both spellings.
"""

from enum import IntEnum

import msgspec

LINE_LIMIT_BYTES = 65536
"""The length, newline included, from which on a host rejects a line."""
_ERROR_CHARACTERS = 8192


class DoneReason(IntEnum):
    """The reason why a completion ended: STOP is the model or a stop string, LENGTH the greatest length."""

    STOP = 0
    LENGTH = 1


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most probable tokens at a position, and the natural logarithm of its probability."""

    token: str
    logprob: float


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generated token, the natural logarithm of its probability, and the most probable tokens at its position."""

    token: str
    logprob: float
    top_logprobs: list[TopLogprob] = []


class Metrics(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The counters of a completion. Durations are in nanoseconds, all other counters are tokens."""

    prompt_eval_count: int = 0
    prompt_eval_cached_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class _Content(msgspec.Struct, frozen=True, rename="pascal", omit_defaults=True):
    content: str
    done: bool
    logprobs: list[Logprob] = []


class _MeteredContent(Metrics, frozen=True, kw_only=True, rename="pascal"):
    content: str
    done: bool = False
    logprobs: list[Logprob] | None = None


class _Final(Metrics, frozen=True, kw_only=True, rename="pascal"):
    content: str = ""
    done: bool = True
    done_reason: int
    logprobs: None = None
    error: None = None
    old_done_reason: int = msgspec.field(name="done_reason")
    old_prompt_eval_count: int = msgspec.field(name="prompt_eval_count")
    old_prompt_eval_duration: int = msgspec.field(name="prompt_eval_duration")
    old_eval_count: int = msgspec.field(name="eval_count")
    old_eval_duration: int = msgspec.field(name="eval_duration")


class _Failure(msgspec.Struct, frozen=True):
    status_code: int = msgspec.field(name="StatusCode")
    status: str = msgspec.field(name="Status")
    error: str


class _Failed(msgspec.Struct, frozen=True, rename="pascal"):
    content: str
    done: bool
    error: _Failure


_encode = msgspec.json.Encoder().encode


def content_lines(text: str, logprobs: list[Logprob], metrics: Metrics | None = None) -> list[bytes]:
    """Returns the lines that deliver `text` and the `logprobs` of its tokens: several if one would be too long.

    `metrics` are the counters up to now; they are only for hosts that ask for counters on every line.
    """
    if metrics is None:
        line = _encode(_Content(text, False, logprobs))
    else:
        line = _encode(_MeteredContent(content=text, logprobs=logprobs or None, **msgspec.structs.asdict(metrics)))
    if len(line) < LINE_LIMIT_BYTES - 1:
        return [line + b"\n"]
    if len(text) < 2 and len(logprobs) < 2:
        return content_lines(text, [], metrics)  # a single entry of `logprobs` is too long for a line, so it is dropped
    half, entries = len(text) // 2, len(logprobs) // 2
    return [
        *content_lines(text[:half], logprobs[:entries], metrics),
        *content_lines(text[half:], logprobs[entries:], metrics),
    ]


def final_line(reason: DoneReason, metrics: Metrics) -> bytes:
    """Returns the last line of a completion."""
    final = _Final(
        done_reason=reason,
        old_done_reason=reason,
        old_prompt_eval_count=metrics.prompt_eval_count,
        old_prompt_eval_duration=metrics.prompt_eval_duration,
        old_eval_count=metrics.eval_count,
        old_eval_duration=metrics.eval_duration,
        **msgspec.structs.asdict(metrics),
    )
    return _encode(final) + b"\n"


def error_line(text: str, status: int = 500) -> bytes:
    """Returns the last line of a completion that failed after its stream had begun. Cuts a very long message."""
    return _encode(_Failed("", False, _Failure(status, "", text[:_ERROR_CHARACTERS]))) + b"\n"
