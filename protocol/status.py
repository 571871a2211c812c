"""The responses to the requests with which a host asks whether its runner is ready."""

from collections.abc import Sequence

import msgspec


class _Status(msgspec.Struct, frozen=True, rename="pascal"):
    status: int
    progress: int
    context_length: int
    memory: int
    embedding_dimensions: list[int] | None = None
    """The lengths that embeddings of the model may have; None for other models. Hosts from 0.40 on read it."""


_READY, _COMPLETE = 0, 100
LOADED = b'{"Success":true}'


def status_body(context_length: int, memory_bytes: int, dimensions: Sequence[int] = ()) -> bytes:
    """Returns the body of the response to `GET /v1/status`, for a ready runner. `context_length` is in tokens;
    `memory_bytes` is device memory; `dimensions` are the lengths that embeddings may have."""
    return msgspec.json.encode(_Status(_READY, _COMPLETE, context_length, memory_bytes, [*dimensions] or None))
