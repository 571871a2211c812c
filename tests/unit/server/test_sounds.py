"""Sounds on their way to the engine: measured before they are counted, refused in time, and forgotten with their
clients."""

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from runner.media.families import Gemma4Sound
from runner.media.prompt import Item, MediaNames
from runner.media.row_store import MediaRows, RowStore
from runner.media.support import Hearing, MediaSupport
from tests.unit.media.pictures import Here
from tests.unit.media.sounds import FLOAT, noise, speech, wav
from tests.unit.server.script import Client, Script

START, SOFT, END = 1, 2, 3
SHORT, LONG = wav(noise(3000)), wav(speech(31, [15.0], 8000), 8000, 8)


def spoiled() -> bytes:
    """A long sound whose last sample is no number."""
    samples = noise(31 * 8000)
    samples[-1] = np.nan
    return wav(samples, 8000, 32, form=FLOAT)


@pytest.fixture
def support(engine: Script) -> Iterator[MediaSupport]:
    hearing = Hearing(Gemma4Sound(), START, SOFT, END)
    support = MediaSupport(None, MediaNames(), RowStore(None, decoder=Here()), hearing)
    engine.vision = support
    yield support
    support.store.close()


def body(*files: bytes, prompt: str = "hear [img-0]") -> dict[str, object]:
    media = [{"data": base64.b64encode(data).decode(), "id": at, "Kind": "audio"} for at, data in enumerate(files)]
    return {"Prompt": prompt, "Media": media}


@pytest.mark.parametrize(
    ("files", "prompt", "text"),
    [
        ([spoiled()], "hear [img-0]", "wav: a sample is not a finite number"),
        ([LONG, spoiled()], "hear [img-0] [img-1]", "wav: a sample is not a finite number"),
        ([LONG], "hear [img-0]", "input length ("),
        ([LONG], "hear [img-1]", "invalid image index: 1"),
        ([b"nothing known"], "hear [img-0]", "unrecognized audio format"),
    ],
)
async def test_what_cannot_be_heard_is_refused_before_the_queue(
    client: Client, engine: Script, support: MediaSupport, files: list[bytes], prompt: str, text: str
) -> None:
    response = await client.post("/completion", json=body(*files, prompt=prompt))
    assert response.status == 400
    assert (await response.text()).startswith(text)
    assert not engine.submitted
    assert support.store.held_bytes == 0, "what was decoded to be counted is forgotten"


async def test_a_client_that_leaves_ends_the_measuring(
    client: Client, engine: Script, support: MediaSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, began, asked = support.store._decoded, threading.Event(), list[Callable[[], bool]]()

    def held(item: Item, left: Callable[[], bool]) -> MediaRows:
        asked.append(left)
        began.set()
        while not left():
            pass
        return decode(item, left)

    monkeypatch.setattr(support.store, "_decoded", held)
    posting = asyncio.ensure_future(client.post("/completion", json=body(LONG)))
    await asyncio.to_thread(began.wait, 10)
    assert not asked[0]()
    posting.cancel()
    async with asyncio.timeout(10):
        while not asked[0]():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(support.store._thread.submit(int).result)
    assert support.store.held_bytes == 0
    assert not engine.submitted


async def test_rows_of_scores_are_measured_too(client: Client, engine: Script, support: MediaSupport) -> None:
    rows = [{"prompt": f"hear [img-{number}]: ", "candidates": ["A", "B"]} for number in (0, 1)]
    sent = {"max_tokens": 90, "rows": rows, "Media": body(SHORT, LONG)["Media"]}
    response = await client.post("/v1/score", json=sent)
    assert (response.status, await response.text()) == (
        400,
        "prompt 1 has 782 tokens; expected 1\u201390 (input is never truncated)\n",
    )
    assert support.store.held_bytes == 0
