"""The path of a token through the engine's Python, counted: calls, files, and crossings from one file to another.

A model of a few million parameters computes a token in a millisecond or two, and a reader has to follow what is
called. Neither may grow unnoticed.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from pathlib import Path
from types import FrameType
from typing import NamedTuple, cast

import pytest
from aiohttp import web

from runner.engine.engine import Engine
from runner.engine.events import Outbox
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.sampling import SamplingOptions
from runner.server.completion import ResponseBody
from scripts.tools.models.scripted import BYTES, write_scripted
from tests.model.engine.test_engine import started

_ROOT = Path(__file__).parents[3]
_PLACES = (f"{_ROOT / 'runner'}/", f"{_ROOT / 'protocol'}/")
SEEING = _ROOT / "scripts" / "demo_seeing_model"
TOKENS = 60
WARM = 20
"""Tokens after which nothing is done for the first time any more."""
CYCLE = {ord(one): ord(other) for one, other in ("ab", "bc", "ca")}


class Call(NamedTuple):
    """A call of a function of `runner` or `protocol`, and the function of either that called it, if one did."""

    function: str
    file: str
    caller: str


def crossings(calls: Sequence[Call]) -> int:
    """Returns the number of calls that lead from one file into another."""
    return sum(call.caller not in ("", call.file) for call in calls)


@contextmanager
def noting(calls: list[Call]) -> Iterator[None]:
    """Records the calls of this thread."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(_PLACES):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_PLACES):
            caller = caller.f_back
        calls.append(Call(frame.f_code.co_qualname, file, caller.f_code.co_filename if caller else ""))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


class Transport:
    """Writes nowhere."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass


class Protocol:
    """The part of a connection that a response needs."""

    def __init__(self) -> None:
        self.transport = Transport()


class Counted(NamedTuple):
    """The calls of each token, in the engine's thread, in `_decode` alone, and in the event loop's thread."""

    steps: list[list[Call]]
    decodes: list[list[Call]]
    deliveries: list[list[Call]]


@pytest.fixture
async def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Returns the calls of a greedy answer, alone, without drafts, a grammar, log-probabilities, stop strings and
    metrics."""
    directory = write_scripted(tmp_path / "model", BYTES, CYCLE, [ord("~")])
    return await counted(directory, monkeypatch, ("step", "decode", "deliver"))


async def counted(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: Sequence[str],
    *,
    no_media: bool = False,
) -> Counted:
    """Returns the calls of one answer of this model for each of these names."""
    path = Counted([], [], [])

    def watch(owner: type, name: str, into: list[list[Call]]) -> None:
        run: Callable[..., object] = getattr(owner, name)

        def noted(*arguments: object) -> object:
            calls: list[Call] = []
            with noting(calls):
                result = run(*arguments)
            into.append(calls)
            return result

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr("runner.engine.engine._PUBLISH_S", math.inf)  # on a busy machine it would be done in each step
    choices = {"prefill_chunk_tokens": 64, "parallel": 1, "draft": "off", "no_media": no_media}
    engine = await started(directory, ends=False, **choices)
    for name in names:
        into = {"step": path.steps, "decode": path.decodes, "deliver": path.deliveries}[name]
        protocol = Protocol()
        body = ResponseBody(cast("web.RequestHandler", protocol), chunked=True)
        asked = Request(
            prompt=[ord("a")],
            max_tokens=TOKENS,
            sampling=SamplingOptions(),
            stops=None,
            metered=False,
        )
        asked.stream.follow(body.write_events)
        owner = {"step": Engine, "decode": Scheduler, "deliver": Outbox}[name]
        watch(owner, f"_{name}", into)
        engine.submit(asked)
        rest = await asyncio.wait_for(body.rest, 30)
        assert b'"eval_count":%d' % TOKENS in rest, rest
        monkeypatch.undo()
    return path


def usual(steps: Sequence[list[Call]]) -> list[Call]:
    """Returns the calls of most tokens in the middle of the answer. At some tokens the engine also publishes its stats,
    and the cache checks its budget."""
    middle = steps[WARM:-2]
    most, _ = Counter(len(calls) for calls in middle).most_common(1)[0]
    return next(calls for calls in middle if len(calls) == most)


def listed(calls: Sequence[Call]) -> str:
    return "\n".join(f"{Path(call.file).name}: {call.function}" for call in calls)


async def test_a_token_takes_few_calls_in_few_files(path: Counted) -> None:
    """A step of the engine, from `Engine._step` to the wake-up of the event loop, of a Llama with one layer.

    Every frame of Python that begins or goes on in `runner/` or `protocol/` is a call: functions, properties,
    comprehensions, and each entry into a generator. A crossing is a call of a file from another one; calls of other
    packages between the two are left out. So are those of the model, whose place a compiled step takes.
    """
    calls = usual(path.steps)
    assert len(calls) <= 83, listed(calls)
    assert len({call.file for call in calls}) <= 20, listed(calls)
    assert crossings(calls) <= 42, listed(calls)


async def test_a_line_takes_few_calls_on_the_event_loop(path: Counted) -> None:
    """From the wake-up to the transport's `write`."""
    calls = usual(path.deliveries)
    assert len(calls) <= 8, listed(calls)
    assert crossings(calls) <= 3, listed(calls)


async def test_a_token_of_text_takes_the_same_calls_with_a_tower_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the demo model that sees. What counts is the least number of calls of each function in a step: what comes with
    the clock is not done in each. A wake-up is left out while the event loop has not come to the last one."""
    seeing, blind = [
        reduce(and_, (Counter(call for call in step if call.function != "Wakeup.wake") for step in path.steps[WARM:-2]))
        for path in [await counted(SEEING, monkeypatch, ("step",), no_media=no_media) for no_media in (False, True)]
    ]
    assert seeing
    assert seeing == blind
