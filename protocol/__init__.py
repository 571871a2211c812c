"""The messages between an Ollama host and its runner: requests, response lines, and the texts of refusals.

A `CompletionReader` turns bytes into a request, the other functions turn values into bytes. No MLX, no sockets.
"""

from protocol.format import Format, FormatError, decode_format
from protocol.reader import CompletionReader, MediaTooLargeError, PromptTooLongError, TooLargeError
from protocol.refusal import BadRequestError
from protocol.request import CompletionRequest, Media, Options
from protocol.response import (
    LINE_LIMIT_BYTES,
    DoneReason,
    Logprob,
    Metrics,
    TopLogprob,
    content_lines,
    error_line,
    final_line,
)
from protocol.status import LOADED, status_body

__all__ = [
    "LINE_LIMIT_BYTES",
    "LOADED",
    "BadRequestError",
    "CompletionReader",
    "CompletionRequest",
    "DoneReason",
    "Format",
    "FormatError",
    "Logprob",
    "Media",
    "MediaTooLargeError",
    "Metrics",
    "Options",
    "PromptTooLongError",
    "TooLargeError",
    "TopLogprob",
    "content_lines",
    "decode_format",
    "error_line",
    "final_line",
    "status_body",
]
