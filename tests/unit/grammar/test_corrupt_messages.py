"""A worker whose messages cannot be read fails its own answer, never the thread that reads them."""

import msgspec
import pytest

from protocol.format import ConstString
from runner.errors import RequestError
from runner.grammar import worker as worker_module
from runner.grammar.guide import Guide
from runner.grammar.messages import State
from runner.grammar.worker import ForkServer, Worker
from runner.process import child
from runner.process.child import framed
from tests.unit.grammar.test_worker_pool import PATIENCE_S, Bench, bench

__all__ = ["bench"]

UNREADABLE = "its grammar process sent an unreadable message: send it again"
BODIES = {
    "no MessagePack": b"\xc1\xff\x00",
    "cut off": msgspec.msgpack.encode(State(error="a"))[:-1],
    "of another type": b"\x92\x01\x02",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_an_unreadable_message_fails_the_answer_and_breaks_the_worker(body: bytes) -> None:
    closed: list[Worker] = []
    worker = Worker(b"", 1, ForkServer(), 1 << 20, closed.append)
    guide = Guide(worker, State(mask=b"\xff"), 8)
    guide.take(0)
    worker.other_end.sendall(framed(body))
    assert guide.wait(PATIENCE_S)
    with pytest.raises(RequestError, match=f"^the answer cannot follow its grammar: {UNREADABLE}$"):
        guide.mask()
    guide.close()
    assert closed == [worker]
    assert worker.broken
    for end in (worker.channel, worker.other_end):
        end.close()


async def test_a_worker_that_sent_an_unreadable_message_is_not_kept(bench: Bench) -> None:
    guide = await bench.guide(ConstString("a"))
    (before,) = bench.workers._busy
    before.feed(framed(b"\xc1"))
    guide.restart([])
    assert guide.wait(PATIENCE_S)
    assert UNREADABLE in guide.fault
    guide.close()
    await bench.until_there_are(0)
    assert (await bench.guide(ConstString("a"))).forced(9) == [ord("a")]


async def test_an_unreadable_message_instead_of_a_grammar_refuses_the_format(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupted(worker: Worker, data: bytes) -> None:
        worker._inbox.feed(framed(b"\xc1") if data else b"")

    monkeypatch.setattr(Worker, "feed", corrupted)
    with pytest.raises(RequestError, match=f"^Format: {UNREADABLE}$"):
        await bench.grammar(ConstString("a"))
    await bench.until_there_are(0)


async def test_a_fork_server_that_says_nothing_is_given_up_and_started_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(child, "_PROGRAM", "import time; time.sleep(600)")
        patch.setattr(worker_module, "_START_S", 0.1)
        with pytest.raises(RequestError, match=r"^Format: the compiler process was not ready within 0\.1 s$"):
            await bench.grammar(ConstString("a"))
    assert (await bench.guide(ConstString("a"))).forced(9) == [ord("a")]
