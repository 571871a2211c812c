"""Pictures over HTTP: what cannot be shown is refused before the queue, and leaves no pixels behind."""

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from PIL import Image

from runner.engine.pictures.support import NoPictures, PictureSupport
from runner.media.families.qwen3_5 import Qwen35
from runner.media.geometry import Pixels
from runner.media.pixels import PixelStore
from runner.media.prompt import Picture, PictureNames
from tests.unit.media.pictures import Here, encoded
from tests.unit.server.script import Client, Script

FAMILY = Qwen35(min_pixels=1)
START, SOFT, END = 60, 62, 61
WHOLE = encoded(Image.effect_noise((96, 64), 80).convert("RGB"))
OTHER = encoded(Image.effect_noise((96, 64), 40).convert("RGB"))
DAMAGED = WHOLE[: len(WHOLE) // 2]


@pytest.fixture
def support(engine: Script) -> Iterator[PictureSupport]:
    support = PictureSupport(FAMILY, START, SOFT, END, PictureNames(), PixelStore(FAMILY, decoder=Here()))
    engine.pictures = cast("NoPictures", support)
    yield support
    support.pixels.close()


def body(*files: bytes, prompt: str = "see [img-0]") -> dict[str, object]:
    media = [{"data": base64.b64encode(data).decode(), "id": at, "Kind": "image"} for at, data in enumerate(files)]
    return {"Prompt": prompt, "Media": media}


@pytest.mark.parametrize(
    ("files", "prompt", "text"),
    [
        ([DAMAGED], "see [img-0]", "decode image: "),
        ([WHOLE, DAMAGED], "see [img-0] [img-1]", "decode image: "),
        ([WHOLE], "see [img-1]", "invalid image index: 1"),
        ([WHOLE], "see " + "[img-0]" * 20, "input length ("),
    ],
)
async def test_what_cannot_be_shown_is_refused_before_the_queue(
    client: Client, engine: Script, support: PictureSupport, files: list[bytes], prompt: str, text: str
) -> None:
    response = await client.post("/completion", json=body(*files, prompt=prompt))
    assert response.status == 400
    assert (await response.text()).startswith(text)
    assert not engine.submitted


@pytest.mark.parametrize("leaves", [False, True])
async def test_no_pixels_stay_of_a_request_that_is_not_taken(
    client: Client, support: PictureSupport, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """The second picture is damaged, or the client leaves while it is being decoded."""
    decode, began, may_end = support.pixels._decoded, threading.Event(), threading.Event()

    def held(shown: Picture, left: Callable[[], bool]) -> Pixels:
        if leaves and shown.name == -2:
            began.set()
            assert may_end.wait(10)
        return decode(shown, left)

    monkeypatch.setattr(support.pixels, "_decoded", held)
    sent = body(WHOLE, OTHER if leaves else DAMAGED, prompt="see [img-0] [img-1]")
    posting = asyncio.ensure_future(client.post("/completion", json=sent))
    if leaves:
        await asyncio.to_thread(began.wait, 10)
        assert support.pixels.held_bytes > 0
        posting.cancel()
        while support.pixels.held_bytes:
            await asyncio.sleep(0.01)
        may_end.set()
        await asyncio.to_thread(support.pixels._thread.submit(int).result)  # behind the one that was being decoded
    else:
        assert (await posting).status == 400
    assert support.pixels.held_bytes == 0
