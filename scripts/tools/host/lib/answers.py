"""One line of a completion stream as a host's Go code reads it (docs/internals/wire.md, 2.4): case-insensitive keys
whose underscores count, unknown keys ignored, null is zero, and a line with one wrong type is no line at all."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from scripts.tools.host.lib.generations import Generation
from scripts.tools.host.lib.golang import Pairs, read_json, valid_text


class TokenLogprob(NamedTuple):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float


class Logprob(NamedTuple):
    """One generated token; `top` is empty when the line has no `top_logprobs`."""

    token: str
    logprob: float
    top: tuple[TokenLogprob, ...]


class ErrorObject(NamedTuple):
    """An `Error` that ends the request."""

    status_code: int
    status: str
    text: str


@dataclass(frozen=True)
class Answer:
    """One decoded line; what the generation does not read, or the line does not say, is Go's zero."""

    content: str = ""
    done: bool = False
    done_reason: int = 0
    prompt_eval_count: int = 0
    prompt_eval_cached_count: int | None = None
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    peak_memory: int = 0
    logprobs: tuple[Logprob, ...] | None = None
    error: ErrorObject | None = None


class Status(NamedTuple):
    """`GET /v1/status`."""

    status: int
    progress: int
    context_length: int
    memory: int


class UndecodableError(ValueError):
    """Go's decoder would refuse this; hosts skip such a line without a word."""


Reader = Callable[[object], object]


def decode_answer(line: bytes, generation: Generation) -> Answer | None:
    """The line as this generation sees it, or None where its host would drop it."""
    readers = {key: _ANSWER[name] for key, name in generation.answer_keys.items()}
    try:
        fields = _struct(_parse(line), readers)
    except UndecodableError:
        return None
    named = {generation.answer_keys[key]: value for key, value in fields.items()}
    return Answer(**named)  # type: ignore[arg-type]  # the readers saw to the types


def decode_status(body: bytes) -> Status:
    """A status body, of which only the first JSON value counts. Raises `UndecodableError`: the host calls that
    unhealthy."""
    readers = {"Status": _int, "Progress": _int, "ContextLength": _int, "Memory": _unsigned}
    # The dimensions are for hosts that embed: here they only have to be well formed.
    fields = _struct(_parse(body, whole=False), {**readers, "EmbeddingDimensions": _ints})
    return Status(*(_int(fields.get(key, 0)) for key in readers))


def decode_ids(body: bytes) -> list[int]:
    """A tokenize body, of which only the first JSON value counts; `null` is an empty list.

    Raises `UndecodableError`.
    """
    value = _parse(body, whole=False)
    return [] if value is None else _ints(value)


def _parse(raw: bytes, *, whole: bool = True) -> object:
    try:
        return read_json(raw, whole=whole)
    except ValueError as error:
        raise UndecodableError(str(error)) from error


def _struct(value: object, readers: Mapping[str, Reader]) -> dict[str, object]:
    """Go's struct decoding: each pair in turn sets the field of exactly that name, or else of that name in any case."""
    if not isinstance(value, Pairs):
        raise UndecodableError(f"not an object: {value!r}")
    folded = {key.lower(): key for key in readers}
    fields = {}
    for key, item in value:
        name = key if key in readers else folded.get(key.lower())
        if name is not None and item is not None:
            fields[name] = readers[name](item)
    return fields


def _int(value: object) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise UndecodableError(f"not an int: {value!r}")
    return value


def _unsigned(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise UndecodableError(f"not a uint64: {value!r}")
    return value


def _float(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]  # a number, then
        raise UndecodableError(f"not a float: {value!r}")
    return float(value)  # type: ignore[arg-type]  # a number, then


def _bool(value: object) -> bool:
    if type(value) is not bool:
        raise UndecodableError(f"not a bool: {value!r}")
    return value


def _string(value: object) -> str:
    if type(value) is not str:
        raise UndecodableError(f"not a string: {value!r}")
    return valid_text(value)


def _list(value: object) -> list[object]:
    if type(value) is not list:
        raise UndecodableError(f"not an array: {value!r}")
    return value


def _ints(value: object) -> list[int]:
    return [_int(item) for item in _list(value)]


def _token(value: object) -> TokenLogprob:
    fields = _struct(value, {"token": _string, "logprob": _float})
    return TokenLogprob(_string(fields.get("token", "")), _float(fields.get("logprob", 0.0)))


def _top(value: object) -> tuple[TokenLogprob, ...]:
    return tuple(_token(item) for item in _list(value))


def _logprob(value: object) -> Logprob:
    fields = _struct(value, {"token": _string, "logprob": _float, "top_logprobs": _top})
    top = fields.get("top_logprobs", ())
    assert isinstance(top, tuple)
    return Logprob(*_token(value), top)


def _logprobs(value: object) -> tuple[Logprob, ...]:
    return tuple(_logprob(item) for item in _list(value))


def _error(value: object) -> ErrorObject:
    fields = _struct(value, {"StatusCode": _int, "Status": _string, "error": _string})
    return ErrorObject(
        _int(fields.get("StatusCode", 0)), _string(fields.get("Status", "")), _string(fields.get("error", ""))
    )


_ANSWER: dict[str, Reader] = {
    "content": _string,
    "done": _bool,
    "done_reason": _int,
    "prompt_eval_count": _int,
    "prompt_eval_cached_count": _int,
    "prompt_eval_duration": _int,
    "eval_count": _int,
    "eval_duration": _int,
    "peak_memory": _unsigned,
    "logprobs": _logprobs,
    "error": _error,
}
