"""Pictures and sounds over HTTP: a file that the model cannot take is refused before the queue, and no rows stay."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image

from protocol import DoneReason, Metrics
from runner.engine.events import Finished, Scored, Started
from runner.media.families import Gemma4Sound, Qwen35
from runner.media.prompt import Item, MediaNames
from runner.media.row_store import FamilyPictures, MediaRows, RowStore
from runner.media.support import Hearing, MediaSupport
from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.unit.media.pictures import Here, encoded, spans
from tests.unit.media.sounds import FLOAT, noise, speech, wav
from tests.unit.server.script import Client, Script

START, SOFT, END = 60, 62, 61
PICTURES = FamilyPictures(Qwen35(min_pixels=1), START, SOFT, END)
WHOLE = encoded(Image.effect_noise((96, 64), 80).convert("RGB"))
OTHER = encoded(Image.effect_noise((96, 64), 40).convert("RGB"))
DAMAGED = WHOLE[: len(WHOLE) // 2]
SHORT, LONG = wav(noise(3000)), wav(speech(31, [15.0], 8000), 8000, 8)
SPOILED = wav(np.append(noise(31 * 8000)[:-1], np.nan), 8000, 32, form=FLOAT)
"""A long sound whose last sample is no number."""


def supporting(engine: Script, pictures: FamilyPictures | None, hearing: Hearing | None) -> Iterator[MediaSupport]:
    engine.vision = support = MediaSupport(pictures, MediaNames(), RowStore(pictures, decoder=Here()), hearing)
    yield support
    support.store.close()


@pytest.fixture
def support(engine: Script) -> Iterator[MediaSupport]:
    yield from supporting(engine, PICTURES, None)


@pytest.fixture
def hearing(engine: Script) -> Iterator[MediaSupport]:
    yield from supporting(engine, None, Hearing(Gemma4Sound(), 1, 2, 3))


def body(*files: bytes, prompt: str, kind: str = "image") -> dict[str, object]:
    media = [{"data": base64.b64encode(data).decode(), "id": at, "Kind": kind} for at, data in enumerate(files)]
    return {"Prompt": prompt, "Media": media}


async def refused(client: Client, path: str, sent: object, status: int, text: str) -> None:
    response = await client.post(path, json=sent)
    assert (response.status, (await response.text())[: len(text)]) == (status, text)


SEE, HEAR = "see [img-0]", "hear [img-0]"


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (body(DAMAGED, prompt=SEE), "decode image: "),
        (body(WHOLE, DAMAGED, prompt="see [img-0] [img-1]"), "decode image: "),
        (body(WHOLE, prompt="see [img-1]"), "invalid image index: 1"),
        (body(WHOLE, prompt="see " + "[img-0]" * 20), "input length ("),
    ],
    ids=["damaged", "second", "unknown", "long"],
)
async def test_what_cannot_be_shown_is_refused_before_the_queue(
    client: Client, engine: Script, support: MediaSupport, sent: dict[str, object], text: str
) -> None:
    await refused(client, "/completion", sent, 400, text)
    assert not engine.submitted
    assert support.store.held_bytes == 0, "nothing stays of what was decoded to be counted"


@pytest.mark.parametrize(
    ("files", "prompt", "text"),
    [
        ([SPOILED], HEAR, "wav: a sample is not a finite number"),
        ([LONG, SPOILED], "hear [img-0] [img-1]", "wav: a sample is not a finite number"),
        ([LONG], HEAR, "input length ("),
        ([LONG], "hear [img-1]", "invalid image index: 1"),
        ([b"nothing known"], HEAR, "unrecognized audio format"),
    ],
    ids=["spoiled", "both", "long", "unknown", "no format"],
)
async def test_what_cannot_be_heard_is_refused_before_the_queue(
    client: Client, engine: Script, hearing: MediaSupport, files: list[bytes], prompt: str, text: str
) -> None:
    await test_what_cannot_be_shown_is_refused_before_the_queue(
        client, engine, hearing, body(*files, prompt=prompt, kind="audio"), text
    )


async def test_no_pixels_stay_of_a_client_that_leaves(
    client: Client, support: MediaSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves while its second picture is being decoded."""
    decode, began, may_end = support.store._decoded, threading.Event(), threading.Event()

    def held(shown: Item, left: Callable[[], bool]) -> MediaRows:
        if shown.name == -2:
            began.set()
            assert may_end.wait(10)
        return decode(shown, left)

    monkeypatch.setattr(support.store, "_decoded", held)
    sent = body(WHOLE, OTHER, prompt="see [img-0] [img-1]")
    posting = asyncio.ensure_future(client.post("/completion", json=sent))
    await asyncio.to_thread(began.wait, 10)
    assert support.store.held_bytes > 0
    posting.cancel()
    while support.store.held_bytes:
        await asyncio.sleep(0.01)
    may_end.set()
    await asyncio.to_thread(support.store._thread.submit(int).result)  # after the picture that was being decoded
    assert support.store.held_bytes == 0


async def test_a_client_that_leaves_ends_the_measuring_of_its_sound(
    client: Client, engine: Script, hearing: MediaSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = hearing
    decode, began, asked = support.store._decoded, threading.Event(), list[Callable[[], bool]]()

    def held(item: Item, left: Callable[[], bool]) -> MediaRows:
        asked.append(left)
        began.set()
        while not left():
            pass
        return decode(item, left)

    monkeypatch.setattr(support.store, "_decoded", held)
    posting = asyncio.ensure_future(client.post("/completion", json=body(LONG, prompt=HEAR, kind="audio")))
    await asyncio.to_thread(began.wait, 10)
    assert not asked[0]()
    posting.cancel()
    async with asyncio.timeout(10):
        while not asked[0]():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(support.store._thread.submit(int).result)
    assert support.store.held_bytes == 0
    assert not engine.submitted


def scored(*files: bytes, prompts: tuple[str, ...] = (f"{SEE}: ",), kind: str = "image", **more: object) -> object:
    rows = [{"prompt": prompt, "candidates": ["A", "B"]} for prompt in prompts]
    return {"max_tokens": 90, "rows": rows, "Media": body(*files, prompt="", kind=kind)["Media"], **more}


async def test_rows_of_scores_show_pictures(
    client: Client, engine: Script, support: MediaSupport, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"tokenizer.json": json.dumps(byte_level(ALL_BYTES, ["]A"])).encode(), "config.json": b"{}"}
    engine.tokenizer = open_tokenizer(texts.get)  # reads an A after a marker, as text, as one token with it
    shown = [START, *[SOFT] * 6, END]
    wanted: dict[str, tuple[list[int], list[bytes]]] = {
        "see [img-0]: ": ([*b"see ", *shown, *b": "], [WHOLE]),
        "see [img-01]": ([*b"see ", *shown], [OTHER]),
        "none: ": ([*b"none: "], []),
        "[img-1][img-0]x": ([*shown, *shown, *b"x"], [OTHER, WHOLE]),
    }
    posting = asyncio.ensure_future(client.post("/v1/score", json=scored(WHOLE, OTHER, prompts=tuple(wanted))))
    for ids, files in wanted.values():
        request = await engine.next()
        assert (request.prompt, request.sampling.candidates) == (ids, (65, 66))
        assert [span.item.data for span in spans(request)] == files
        assert support.store.held_bytes > 0, "both are decoded before a row is computed"
        metrics = Metrics(prompt_eval_count=len(ids))
        engine.tell(request, Started(), Scored([-1, -2]), Finished(DoneReason.STOP, metrics))
    answer = await (await posting).json()
    assert answer["input_tokens"] == sum(len(ids) for ids, _ in wanted.values())
    assert support.store.held_bytes == 0, "nobody took them"
    assert "media that no marker names" not in caplog.text


MANY = "Bad Request: more than 5242880 bytes of rows, or more than 1024 media"


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (scored(DAMAGED), 400, "decode image: "),
        (scored(WHOLE, prompts=("x", "[img-1]")), 400, "invalid image index: 1"),
        (scored(WHOLE, max_tokens=9), 400, "prompt 0 has 12 tokens; expected 1\u20139"),
        (scored(b""), 400, "decode image: "),
        (scored(Media=[{}] * 1025), 400, MANY),
        (scored(rows=[{}] * 2_000_000), 400, MANY),
        (scored(more="x" * (38 << 20)), 413, "the request has "),
    ],
    ids=["damaged", "unknown", "long", "empty", "many", "rows", "large"],
)
async def test_what_cannot_be_scored_is_refused_before_the_queue(
    client: Client, engine: Script, support: MediaSupport, sent: object, status: int, text: str
) -> None:
    await refused(client, "/v1/score", sent, status, text)
    assert not engine.submitted
    assert support.store.held_bytes == 0


async def test_rows_of_scores_are_measured_too(client: Client, engine: Script, hearing: MediaSupport) -> None:
    sent = scored(SHORT, LONG, prompts=("hear [img-0]: ", "hear [img-1]: "), kind="audio")
    await test_what_cannot_be_scored_is_refused_before_the_queue(
        client, engine, hearing, sent, 400, "prompt 1 has 782 tokens; expected 1\u201390 (input is never truncated)\n"
    )


async def test_pictures_of_scores_are_refused_by_a_text_model(client: Client, engine: Script) -> None:
    await refused(client, "/v1/score", scored(WHOLE, images=["x"]), 400, "this model does not support image input\n")
    await refused(client, "/v1/score", scored(more="x" * (6 << 20)), 413, "the request has ")
    assert not engine.submitted
