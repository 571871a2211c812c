"""Keys and values without an effect: one line in the log for each, and none for what hosts send."""

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


async def answered(client: Client, engine: Script, body: dict[str, object]) -> None:
    posted, request = await engine.posted(client, **body)
    engine.tell(request, Started(), Finished(DoneReason.STOP, Metrics()))
    assert (await posted).status == 200
    assert request.sampling.top_logprobs <= 20


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda each: each.letter)
def test_nothing_that_a_host_sends_is_remarked_upon(generation: Generation, caplog: pytest.LogCaptureFixture) -> None:
    every: dict[str, object] = dict.fromkeys(OPTIONS, 1) | {"stop": ["a"], "use_mmap": True}
    for options in (generation.default_options, every):
        request = Request("x", options, logprobs=True, top_logprobs=3, media=(Medium(b"x"),), format={"type": "object"})
        read, _ = read_completion(encode(request, generation))
        Remarks().log_unknown(read.strangers)
    assert remarks(caplog) == []


def test_an_unknown_key_is_named_with_its_place_and_the_key_that_it_may_be(caplog: pytest.LogCaptureFixture) -> None:
    keys = "max_tokens num_predict Temperature images messages prompts top_logprobs num_ctx zzz"
    meant = "num_predict num_predict temperature Media Prompt Prompt TopLogprobs num_ctx"
    for key in keys.split():
        unknown(f'{{"{key}":[{{"x":1}}],"Prompt":"secret"}}'.encode(), Remarks())
    unknown(b'{"Options":{"num_predct":1,"num_ctx":5},"Media":[{"type":1},{"type":1,"datas":""}]}', Remarks())
    names = [name if name[0].isupper() else f"Options.{name}" for name in meant.split()]
    assert [(each["key"], each.get("meant")) for each in remarks(caplog)] == [
        *zip(keys.split(), [*names, None], strict=True),
        ("Options.num_predct", "Options.num_predict"),
        ("Media[].type", None),
        ("Media[].datas", "Media[].data"),
    ]


async def test_each_is_remarked_upon_once_in_the_life_of_a_runner(
    client: Client, engine: Script, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_predict": 5, "top_p": 7, "temperature": -1, "min_p": 1.5, "repeat_penalty": -2}
    for _ in range(3):
        await answered(client, engine, {"max_tokens": 5, "TopLogprobs": 50, "Options": options})
    assert remarks(caplog) == [
        {"key": "max_tokens", "meant": "Options.num_predict"},
        {"key": "Options.temperature", "value": -1.0, "instead": "0"},
        {"key": "Options.top_p", "value": 7.0, "instead": "off"},
        {"key": "Options.min_p", "value": 1.5, "instead": "off"},
        {"key": "Options.repeat_penalty", "value": -2.0, "instead": "off"},
        {"key": "TopLogprobs", "value": 50, "instead": "0, without Logprobs"},
    ]


async def test_of_values_in_range_nothing_is_said(
    client: Client, engine: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """Some of them switch something off."""
    for options in ({"top_p": 1, "min_p": 1, "top_k": -1, "seed": -1, "repeat_last_n": -1}, {}):
        await answered(client, engine, {"Options": options})
    for most in (20, 0, 21):
        await answered(client, engine, {"Logprobs": True, "TopLogprobs": most})
    assert remarks(caplog) == [{"key": "TopLogprobs", "value": 21, "instead": "20"}]


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
