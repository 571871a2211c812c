"""Keys and values without an effect: one line in the log for each, and none for what hosts send."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from protocol import DoneReason, Metrics
from runner.engine.events import Finished, Started
from runner.server.remarks import MOST_KEYS, Remarks
from scripts.tools.host.lib import GENERATIONS, Generation, Medium, Request
from scripts.tools.host.lib.generations import OPTIONS
from scripts.tools.host.lib.requests import encode
from tests.unit.protocol.reading import read_completion
from tests.unit.server.script import Client, Script


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "runner.server.remarks")


def remarks(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The attributes of the lines so far."""
    return [record.attributes for record in caplog.records if record.name == "runner.server.remarks"]  # type: ignore[attr-defined]  # ours


def unknown(body: bytes, to: Remarks) -> None:
    to.log_unknown(read_completion(body)[0].strangers)


async def answered(client: Client, engine: Script, body: object) -> None:
    posted = asyncio.create_task(client.post("/completion", json=body))
    engine.tell(await engine.next(), Started(), Finished(DoneReason.STOP, Metrics()))
    assert (await posted).status == 200


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda each: each.letter)
def test_nothing_that_a_host_sends_is_remarked_upon(generation: Generation, caplog: pytest.LogCaptureFixture) -> None:
    every: dict[str, object] = dict.fromkeys(OPTIONS, 1) | {"stop": ["a"], "use_mmap": True}
    for options in (generation.default_options, every):
        request = Request("x", options, logprobs=True, top_logprobs=3, media=(Medium(b"x"),), format={"type": "object"})
        read, _ = read_completion(encode(request, generation))
        Remarks().log_unknown(read.strangers)
    assert remarks(caplog) == []


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_tokens", "Options.num_predict"),
        ("num_predict", "Options.num_predict"),
        ("Temperature", "Options.temperature"),
        ("images", "Media"),
        ("messages", "Prompt"),
        ("prompts", "Prompt"),
        ("top_logprobs", "TopLogprobs"),
        ("num_ctx", "Options.num_ctx"),
        ("zzz", None),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_it_may_be(
    key: str, meant: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    unknown(f'{{"{key}":[{{"x":1}}],"Prompt":"secret"}}'.encode(), Remarks())
    assert remarks(caplog) == [{"key": key} | ({"meant": meant} if meant is not None else {})]


def test_keys_of_options_and_media_have_their_place(caplog: pytest.LogCaptureFixture) -> None:
    to = Remarks()
    unknown(b'{"Options":{"num_predct":1,"num_ctx":5},"Media":[{"type":1},{"type":1,"datas":""}]}', to)
    assert [(each["key"], each.get("meant")) for each in remarks(caplog)] == [
        ("Options.num_predct", "Options.num_predict"),
        ("Media[].type", None),
        ("Media[].datas", "Media[].data"),
    ]


async def test_each_is_remarked_upon_once_in_the_life_of_a_runner(
    client: Client, engine: Script, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_predict": 5, "top_p": 7, "temperature": -1, "min_p": 1.5, "repeat_penalty": -2}
    for _ in range(3):
        await answered(client, engine, {"Prompt": "x", "max_tokens": 5, "TopLogprobs": 50, "Options": options})
    assert remarks(caplog) == [
        {"key": "max_tokens", "meant": "Options.num_predict"},
        {"key": "Options.temperature", "value": -1.0, "instead": "0"},
        {"key": "Options.top_p", "value": 7.0, "instead": "off"},
        {"key": "Options.min_p", "value": 1.5, "instead": "off"},
        {"key": "Options.repeat_penalty", "value": -2.0, "instead": "off"},
        {"key": "TopLogprobs", "value": 50, "instead": "0, without Logprobs"},
    ]


async def test_the_most_alternatives_are_named(
    client: Client, engine: Script, caplog: pytest.LogCaptureFixture
) -> None:
    for most in (20, 0, 21):
        await answered(client, engine, {"Prompt": "x", "Logprobs": True, "TopLogprobs": most})
    assert remarks(caplog) == [{"key": "TopLogprobs", "value": 21, "instead": "20"}]


@pytest.mark.parametrize("options", [{"top_p": 1, "min_p": 1, "top_k": -1, "seed": -1, "repeat_last_n": -1}, {}])
async def test_values_that_switch_something_off_are_in_range(
    client: Client, engine: Script, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    await answered(client, engine, {"Prompt": "x", "Options": options})
    assert remarks(caplog) == []


def hostile(start: int) -> bytes:
    return b"{" + b",".join(b'"%d%s":0' % (number, b"k" * 5000) for number in range(start, start + 50)) + b"}"


def test_a_hostile_client_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    to = Remarks()
    counts: Sequence[int] = []
    for start in range(0, 2000, 50):
        read, _ = read_completion(hostile(start))
        counts = [*counts, len(read.strangers)]
        to.log_unknown(read.strangers)
    lines = remarks(caplog)
    assert max(counts) == 16
    assert sum("key" in line for line in lines) == MOST_KEYS
    assert max(len(str(line.get("key", ""))) for line in lines) == 40
    assert [line for line in lines if "key" not in line] == [{"keys": MOST_KEYS}]
