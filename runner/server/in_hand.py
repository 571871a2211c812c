"""Requests between their preparation and their end: their pictures are decoded first, and nothing of them stays."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from runner.engine.request import Request
from runner.errors import MediaError, RequestError
from runner.pictures.support import NoPictures, PictureSupport


@asynccontextmanager
async def in_hand(requests: Sequence[Request], pictures: PictureSupport | NoPictures) -> AsyncIterator[None]:
    """Has the pictures of the requests decoded that were never seen. RequestError if one is damaged. When the block
    ends, the requests are cancelled, and the pixels that they did not come to take are forgotten."""
    shown = [span.picture for each in requests if each.pictures is not None for span in each.pictures.spans]
    pixels = pictures.pixels if isinstance(pictures, PictureSupport) else None
    try:
        for picture in shown:
            if pixels is not None and not pixels.is_sound(picture):
                await asyncio.wrap_future(pixels.check(picture, lambda: requests[0].cancelled))
        yield
    except MediaError as error:
        raise RequestError(str(error)) from None
    finally:
        for request in requests:
            request.cancel()
        for picture in shown:
            if pixels is not None:
                pixels.drop(picture)
