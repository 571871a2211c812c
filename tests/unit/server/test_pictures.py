"""Pictures over HTTP: what cannot be shown is refused before the queue, and leaves no pixels behind."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator

import pytest
from PIL import Image

from protocol import DoneReason, Metrics
from runner.engine.events import Finished, Scored, Started
from runner.media.families import Qwen35
from runner.media.prompt import Item, MediaNames
from runner.media.row_store import FamilyPictures, MediaRows, RowStore
from runner.media.support import MediaSupport
from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.unit.media.pictures import Here, encoded, spans
from tests.unit.server.script import Client, Script

START, SOFT, END = 60, 62, 61
PICTURES = FamilyPictures(Qwen35(min_pixels=1), START, SOFT, END)
WHOLE = encoded(Image.effect_noise((96, 64), 80).convert("RGB"))
OTHER = encoded(Image.effect_noise((96, 64), 40).convert("RGB"))
DAMAGED = WHOLE[: len(WHOLE) // 2]


@pytest.fixture
def support(engine: Script) -> Iterator[MediaSupport]:
    support = MediaSupport(PICTURES, MediaNames(), RowStore(PICTURES, decoder=Here()))
    engine.vision = support
    yield support
    support.store.close()


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
    client: Client, engine: Script, support: MediaSupport, files: list[bytes], prompt: str, text: str
) -> None:
    response = await client.post("/completion", json=body(*files, prompt=prompt))
    assert response.status == 400
    assert (await response.text()).startswith(text)
    assert not engine.submitted


@pytest.mark.parametrize("leaves", [False, True])
async def test_no_pixels_stay_of_a_request_that_is_not_taken(
    client: Client, support: MediaSupport, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """The second picture is damaged, or the client leaves while it is being decoded."""
    decode, began, may_end = support.store._decoded, threading.Event(), threading.Event()

    def held(shown: Item, left: Callable[[], bool]) -> MediaRows:
        if leaves and shown.name == -2:
            began.set()
            assert may_end.wait(10)
        return decode(shown, left)

    monkeypatch.setattr(support.store, "_decoded", held)
    sent = body(WHOLE, OTHER if leaves else DAMAGED, prompt="see [img-0] [img-1]")
    posting = asyncio.ensure_future(client.post("/completion", json=sent))
    if leaves:
        await asyncio.to_thread(began.wait, 10)
        assert support.store.held_bytes > 0
        posting.cancel()
        while support.store.held_bytes:
            await asyncio.sleep(0.01)
        may_end.set()
        await asyncio.to_thread(support.store._thread.submit(int).result)  # behind the one that was being decoded
    else:
        assert (await posting).status == 400
    assert support.store.held_bytes == 0


# --- scores


def scored(*files: bytes, prompts: tuple[str, ...] = ("see [img-0]: ",), **more: object) -> dict[str, object]:
    rows = [{"prompt": prompt, "candidates": ["A", "B"]} for prompt in prompts]
    return {"max_tokens": 90, "rows": rows, "Media": body(*files)["Media"], **more}


async def test_rows_of_scores_show_pictures(
    client: Client, engine: Script, support: MediaSupport, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"tokenizer.json": json.dumps(byte_level(ALL_BYTES, ["]A"])).encode(), "config.json": b"{}"}
    engine.tokenizer = open_tokenizer(texts.get)  # which reads an A behind a marker, as text, as one token with it
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


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (scored(DAMAGED), 400, "decode image: "),
        (scored(WHOLE, prompts=("x", "[img-1]")), 400, "invalid image index: 1"),
        (scored(WHOLE, max_tokens=9), 400, "prompt 0 has 12 tokens; expected 1\u20139"),
        (scored(b""), 400, "decode image: "),
        (scored(Media=[{}] * 1025), 400, "Bad Request: more than 5242880 bytes of rows, or more than 1024 media"),
        (scored(rows=[{}] * 2_000_000), 400, "Bad Request: more than 5242880 bytes of rows, or more than 1024 media"),
        (scored(more="x" * (38 << 20)), 413, "the request has "),
    ],
    ids=["damaged", "unknown", "long", "empty", "many", "rows", "large"],
)
async def test_what_cannot_be_scored_is_refused_before_the_queue(
    client: Client, engine: Script, support: MediaSupport, sent: dict[str, object], status: int, text: str
) -> None:
    response = await client.post("/v1/score", json=sent)
    assert (response.status, (await response.text())[: len(text)]) == (status, text)
    assert not engine.submitted
    assert support.store.held_bytes == 0


async def test_pictures_of_scores_are_refused_by_a_text_model(client: Client, engine: Script) -> None:
    response = await client.post("/v1/score", json=scored(WHOLE, images=["ignored"]))
    assert (response.status, await response.text()) == (400, "this model does not support image input\n")
    response = await client.post("/v1/score", json=scored(more="x" * (6 << 20)))
    assert response.status == 413
