"""The wire between an Ollama host and its runner, as data: what arrives, what is sent, and the words of refusals.

No MLX, no sockets, no clock: `decode_completion` and the `*_line` functions turn bytes into values and back.
"""

from protocol.format import Format, FormatError, decode_format
from protocol.golang import BadRequestError
from protocol.request import CompletionRequest, Media, Options, decode_completion
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
    "CompletionRequest",
    "DoneReason",
    "Format",
    "FormatError",
    "Logprob",
    "Media",
    "Metrics",
    "Options",
    "TopLogprob",
    "content_lines",
    "decode_completion",
    "decode_format",
    "error_line",
    "final_line",
    "status_body",
]
