"""Pictures through `scripts/host`: their kinds, their markers, and a real model that sees."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tools.models.png import png
from scripts.tools.models.sources import write_source
from tests.tools.scripts.test_host_process import Served, ask, served

RED, BLUE = (base64.b64encode(png(40, 30, colour)).decode() for colour in ((250, 0, 0), (0, 0, 250)))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("model") / "seeing", "qwen3.5-seeing")


@pytest.fixture(scope="module")
def host(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served([str(seeing)], tmp_path_factory.mktemp("host")) as running:
        yield running


async def test_a_chat_with_a_picture_is_answered(host: Served) -> None:
    options = {"num_predict": 2, "temperature": 0}
    first = {"role": "user", "content": "What is this?"}
    plain = await ask(host, "/api/chat", {"model": "seeing", "messages": [first], "options": options})
    shown = {**first, "images": [RED]}
    answer = await ask(host, "/api/chat", {"model": "seeing", "messages": [shown], "options": options})
    assert (plain.status, answer.status) == (200, 200)
    assert int(str(answer.last["prompt_eval_count"])) > int(str(plain.last["prompt_eval_count"])) + 60
    turn = {"role": "user", "content": "And this?", "images": [BLUE]}
    talk = [shown, {"role": "assistant", "content": "Red."}, turn]
    again = await ask(host, "/api/chat", {"model": "seeing", "messages": talk, "options": options})
    assert int(str(again.last["prompt_eval_cached_count"])) > 60, "the first picture is not read again"
    body = {"model": "seeing", "prompt": "[img] is what?", "images": [BLUE], "options": options}
    assert (await ask(host, "/api/generate", body)).status == 200
