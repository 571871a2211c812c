"""The answers to a host's polls."""

from collections.abc import Sequence

import msgspec


class _Status(msgspec.Struct, frozen=True, rename="pascal"):
    status: int
    progress: int
    context_length: int
    memory: int
    embedding_dimensions: list[int] | None = None
    """The sizes in which the model embeds texts; hosts from 0.40 look for the key."""


_READY, _COMPLETE = 0, 100
LOADED = b'{"Success":true}'


def status_body(context_length: int, memory_bytes: int, dimensions: Sequence[int] = ()) -> bytes:
    """Returns the body of `GET /v1/status` of a ready runner, with tokens of context, bytes of device memory, and the
    sizes of embeddings."""
    return msgspec.json.encode(_Status(_READY, _COMPLETE, context_length, memory_bytes, [*dimensions] or None))
