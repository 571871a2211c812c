"""Go's own words and forms, as far as a host shows them to its user: text, signals, errors of its HTTP client,
durations."""

import codecs
import json
import math
import re
from typing import NoReturn

import aiohttp

_SIGNALS = (
    *("hangup", "interrupt", "quit", "illegal instruction", "trace/breakpoint trap", "aborted", "bus error"),
    *("floating point exception", "killed", "user defined signal 1", "segmentation fault", "user defined signal 2"),
    *("broken pipe", "alarm clock", "terminated"),
)
"""From 1 on, as Linux numbers them."""
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(sorted(_UNITS_S, key=len, reverse=True))})")


LONGEST_S = 2**63 / 1e9
"""Go's longest duration."""


def _one_for_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("go", _one_for_each_byte)


def utf8_text(raw: bytes) -> str:
    """Replaces each byte that is not UTF-8 by U+FFFD."""
    return raw.decode(errors="go")


def valid_text(text: str) -> str:
    """A lone surrogate becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Pairs(list[tuple[str, object]]):
    """A JSON object with its duplicates, in order."""


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"invalid character '{constant.lstrip('-')[0]}' looking for beginning of value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=Pairs)


def read_json(raw: bytes, *, whole: bool = True) -> object:
    """Returns the JSON value in `raw`, with `whole` false the first one, whatever follows. Raises ValueError."""
    text = utf8_text(raw).lstrip(" \t\r\n")
    try:
        value, end = _DECODER.raw_decode(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if whole and text[end:].strip(" \t\r\n"):
        raise ValueError(f"something follows: {text[end:]!r}")
    return value


def signal_name(number: int) -> str:
    return _SIGNALS[number - 1] if 0 < number <= len(_SIGNALS) else f"signal {number}"


def request_error(error: Exception, url: str) -> str:
    address = url.removeprefix("http://").partition("/")[0]
    if isinstance(error, TimeoutError):
        return f'Post "{url}": context deadline exceeded (Client.Timeout exceeded while awaiting headers)'
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return f'Post "{url}": EOF'
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = "connection refused" if isinstance(error.os_error, ConnectionRefusedError) else str(error.os_error)
        return f'Post "{url}": dial tcp {address}: connect: {reason}'
    return f'Post "{url}": {body_error(error)}'


def body_error(error: Exception) -> str:
    """Returns the HTTP client's error when a body broke off."""
    if isinstance(error, TimeoutError):
        return "context deadline exceeded (Client.Timeout or context cancellation while reading body)"
    if isinstance(error, ConnectionResetError) or isinstance(error.__cause__, ConnectionResetError):
        return "read: connection reset by peer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "unexpected EOF"
    return str(error)


def duration_s(text: str) -> float:
    """A duration as Go writes it (`1h30m`, `-1.5s`, `0`), in seconds. Raises ValueError in Go's words."""
    rest = text[1:] if text.startswith(("+", "-")) else text
    if rest == "0":
        return 0.0
    parts = _PART.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        raise ValueError(f'time: invalid duration "{text}"')
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if seconds > LONGEST_S:
        raise ValueError(f'time: invalid duration "{text}"')
    return -seconds if text.startswith("-") else seconds


def keep_alive_s(value: object) -> float:
    """`keep_alive` of a request: seconds, at most `LONGEST_S`, or a duration; negative values mean for ever.

    Raises ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"Unsupported type: '{type(value).__name__}'")  # noqa: TRY004 - one error for all bad values
    seconds = duration_s(value) if isinstance(value, str) else float(value)
    return math.inf if seconds < 0 else min(seconds, LONGEST_S)


def host_duration_s(text: str) -> float:
    """An environment variable of the host, a duration or whole seconds. Raises ValueError."""
    return float(int(text)) if re.fullmatch(r"[+-]?\d+", text.strip()) else duration_s(text.strip())
