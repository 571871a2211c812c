"""The body of a request, as long as anybody has a use for."""

from http import HTTPStatus

from aiohttp import web

from runner.errors import RequestError

MOST_BYTES = 1 << 30
"""Of one body. Hosts know no limit, but memory has one: prompts and pictures are some hundred megabytes at most."""


async def read_body(http: web.Request) -> bytes:
    """The whole body. RequestError for one that is compressed, as no host sends it, or that never seems to end.

    A compressed body is not unpacked: a megabyte of it may stand for a gigabyte.
    """
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError("Bad Request")
    chunks: list[bytes] = []
    size = 0
    while chunk := await http.content.readany():
        size += len(chunk)
        if size > MOST_BYTES:
            raise RequestError(f"a body has at most {MOST_BYTES} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        chunks.append(chunk)
    return b"".join(chunks)
