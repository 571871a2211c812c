"""Requests between their preparation and their end: their pictures are decoded first, and nothing of them stays."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from runner.engine.request import Request, Vision
from runner.errors import MediaError, RequestError


@asynccontextmanager
async def in_hand(requests: Sequence[Request], vision: Vision) -> AsyncIterator[None]:
    """Has the pictures of the requests decoded that were never seen. RequestError if one is damaged. When the block
    ends, the requests are cancelled, and the pixels that they did not come to take are forgotten."""
    shown = [each.pictures for each in requests if each.pictures is not None]
    try:
        for prompt in shown:
            for decoding in vision.decode(prompt, lambda: requests[0].cancelled):
                await asyncio.wrap_future(decoding)
        yield
    except MediaError as error:
        raise RequestError(str(error)) from None
    finally:
        for request in requests:
            request.cancel()
        for prompt in shown:
            vision.drop(prompt)
