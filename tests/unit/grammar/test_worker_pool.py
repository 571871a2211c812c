"""Formats are compiled and followed in processes that can be killed, without harm to other answers."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Thread
from time import monotonic
from types import SimpleNamespace

import msgspec
import pytest

from protocol.format import ConstString, Format
from runner.engine.answer_grammar import Grammar
from runner.errors import RequestError
from runner.grammar import worker as worker_module
from runner.grammar import worker_pool
from runner.grammar.guide import Guide
from runner.grammar.messages import KILL, ORDER, CompilerSetup, State
from runner.grammar.worker import ForkServer, Worker
from runner.grammar.worker_pool import WorkerPool
from runner.process import child as child_module
from runner.process.child import framed
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.lib.hostile_formats import FORMATS
from tests.unit.grammar.walks import WORDS, bits, format_of, guide_of, opened

END = len(ALL_BYTES) + len(WORDS)
FILES: dict[str, object] = {
    "tokenizer.json": byte_level([*ALL_BYTES, *WORDS], ["<|end|>"]),
    "generation_config.json": {"eos_token_id": END},
}
ENDLESS = format_of(FORMATS["a large divisor"])
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
PATIENCE_S = 60.0


class Bench:
    """A worker pool, with access to its processes."""

    def __init__(self, directory: Path, running: int = 4) -> None:
        for name, value in FILES.items():
            (directory / name).write_text(json.dumps(value))
        files = {name: os.fsencode(directory / name) for name in FILES}
        self.later_s = 0.0
        """The time that has passed beside what the clock says."""
        self.workers = WorkerPool(
            CompilerSetup(files, merge_eos=False, vocab_size=0), END + 1, running, lambda: monotonic() + self.later_s
        )

    def compile(self, wanted: Format) -> Future[Grammar]:
        self.workers.compile(wanted, grammar := self.workers.expect())
        return grammar

    async def grammar(self, wanted: Format) -> Grammar:
        return await asyncio.wait_for(asyncio.wrap_future(self.compile(wanted)), PATIENCE_S)

    async def guide(self, wanted: Format) -> Guide:
        guide = (await self.grammar(wanted)).guide()
        assert isinstance(guide, Guide)
        return guide

    @property
    def fork_server(self) -> int:
        """The process id of the fork server."""
        assert self.workers._fork_server is not None
        child = self.workers._fork_server.result().child
        assert child is not None
        return child.process.pid

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers."""
        children = Path(f"/proc/{self.fork_server}/task/{self.fork_server}/children").read_text().split()
        alive = []
        for child in children:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                if "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
                    alive.append(int(child))
        return alive

    async def end(self) -> None:
        """Ends all processes, and closes the connections to them."""
        for worker in [*self.workers._busy, *self.workers._kept]:
            worker.channel.close()
        if self.workers._fork_server is not None:
            (await self.workers._fork_server).close()

    async def refusal(self, compiling: Future[Grammar]) -> str:
        """Returns why a format was refused, after more time than any process may be silent."""
        self.later_s += 100.0
        while not compiling.done():
            await asyncio.sleep(0.01)
            self.later_s += float(any(each.killed_s is not None for each in self.workers._busy))
        error = compiling.exception()
        assert isinstance(error, RequestError)
        assert error.status == 503
        return str(error)

    async def until_there_are(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.processes) != count:
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    await bench.end()


def settled(guide: Guide) -> tuple[bool, list[int], bytes]:
    assert guide.wait(PATIENCE_S)
    return guide.complete, guide.forced(99), b"" if guide.complete else guide.mask()


@pytest.mark.parametrize("wanted", [SCHEMA, {"type": "regex", "pattern": "[a-f]{3}x+"}])
async def test_a_guide_in_a_process_agrees_with_one_in_this_process(wanted: object, bench: Bench) -> None:
    tokenizer = opened(FILES["tokenizer.json"], generation_config=FILES["generation_config.json"])
    for seed in range(3):  # the later ones by the worker of the first
        there, here, random = await bench.guide(format_of(wanted)), guide_of(wanted, tokenizer), Random(seed)
        tokens: list[int] = []
        for step in range(30):
            state = settled(here)
            assert settled(there) == state
            complete, forced, _ = state
            tokens += forced
            possible = [] if complete else [token for token in bits(here.mask()) if token != END]
            if not possible:
                break
            assert there.look_ahead(possible[:1], PATIENCE_S) == here.look_ahead(possible[:1], PATIENCE_S)
            tokens.append(random.choice(possible))
            if step % 7 == 6:
                there.restart(tokens)
                here.restart(tokens)
            else:
                there.take(tokens[-1])
                here.take(tokens[-1])
        assert there.wait(PATIENCE_S), "or it would not be kept"
        there.close()
        await asyncio.sleep(0)
    assert len(bench.processes) == 1


async def test_several_answers_of_one_format_are_computed_at_once(bench: Bench) -> None:
    guides = [await bench.guide(ConstString("a" * 3)) for _ in range(3)]
    assert [guide.forced(9) for guide in guides] == [guides[0].forced(0) or [*b"aaa"]] * 3
    assert len(bench.processes) == 3


async def test_a_worker_is_kept_for_its_format_and_the_least_recently_used_is_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_MOST_KEPT", 2)

    async def number(text: str) -> int:
        grammar = await bench.grammar(ConstString(text))
        (found,) = bench.workers._busy
        grammar.release()
        await asyncio.sleep(0)
        return found.number

    assert [await number(text) for text in "aabab"] == [1, 1, 2, 1, 2]
    assert [await number(text) for text in "cbac"] == [3, 2, 4, 5]
    await bench.until_there_are(2)


async def test_a_grammar_that_was_given_back_has_no_guide(bench: Bench) -> None:
    grammar = await bench.grammar(ConstString("a"))
    grammar.release()
    grammar.release()
    assert grammar.guide() is None


async def test_kept_workers_have_a_limit_in_bytes(bench: Bench) -> None:
    large = format_of({"properties": {f"p{number}": {"type": "integer"} for number in range(300)}})
    for kept, bench.workers.most_kept_bytes in ((1, 64 << 20), (0, 1)):
        grammar = await bench.grammar(large)
        assert 1_000_000 < bench.workers.nbytes < 8_000_000, "what it shares with other processes does not count"
        grammar.release()
        assert not bench.workers.nbytes, "nobody uses it, and it is not kept yet"
        await asyncio.sleep(0)
        assert (bench.workers.nbytes > 0) == kept
        await bench.until_there_are(kept)


async def test_an_invalid_format_is_reported_and_not_kept(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=r"Invalid type: strin - at `\$.items`"):
            await bench.grammar(format_of({"items": {"type": "strin"}}))
    await bench.until_there_are(0)
    assert (await bench.guide(ConstString("a"))).forced(9) == [ord("a")]


async def test_compiling_has_a_limit_of_time(bench: Bench) -> None:
    with pytest.raises(RequestError, match="longer than 5 s"):
        await bench.grammar(format_of(FORMATS["free texts that branch"]))
    await bench.until_there_are(0)


async def test_compiling_has_a_limit_of_memory(bench: Bench) -> None:
    large = format_of({"properties": {f"p{number}": {"type": "integer"} for number in range(3000)}})
    bench.workers.worker_bytes = 1 << 20  # beside some megabytes that were freed before the fork
    with pytest.raises(RequestError, match=r"more than 1.0 MB of memory|MemoryError"):
        await bench.grammar(large)
    await bench.until_there_are(0)


async def test_compiling_ends_when_the_request_is_cancelled(bench: Bench) -> None:
    await bench.grammar(ConstString("a"))
    compiling = [bench.compile(ENDLESS) for _ in range(3)]
    await bench.until_there_are(4)
    for each in compiling:
        assert each.cancel()
    await bench.until_there_are(1)
    assert not bench.workers._compiling


async def test_a_request_that_waits_has_no_worker_and_many_of_them_stop_what_compiles_for_long(bench: Bench) -> None:
    compiled = await bench.grammar(ConstString("a"))
    endless = bench.compile(ENDLESS)
    waiting = [bench.workers.expect() for _ in range(7)]
    with pytest.raises(RequestError, match="while others wait"):
        await asyncio.wait_for(asyncio.wrap_future(endless), PATIENCE_S)
    await bench.until_there_are(1)
    guide = compiled.guide()
    assert guide is not None
    assert guide.forced(1) == [ord("a")], "which nothing takes from it"
    assert all(each.cancel() for each in waiting)
    assert not bench.workers._waiting


async def test_what_is_kept_ends_from_any_thread_and_counts_no_more_at_once(bench: Bench) -> None:
    for text in "ab":
        (await bench.grammar(ConstString(text))).release()
    await asyncio.sleep(0)
    assert bench.workers.nbytes
    thread = Thread(target=bench.workers.end_kept)
    thread.start()
    thread.join()
    assert not bench.workers.nbytes
    await bench.until_there_are(0)
    assert (await bench.guide(ConstString("a"))).forced(9) == [ord("a")]


async def test_a_worker_that_dies_ends_its_answer_only(bench: Bench) -> None:
    guide, other = await bench.guide(format_of(SCHEMA)), await bench.guide(format_of(SCHEMA))
    before = settled(other)
    assert settled(guide) == before
    os.kill(min(bench.processes), signal.SIGKILL)
    await bench.until_there_are(1)
    guide.take(bits(guide.mask())[0])
    assert guide.wait(PATIENCE_S)
    with pytest.raises(RequestError, match="memory, or crashes llguidance"):
        guide.mask()
    guide.close()
    other.take(bits(other.mask())[0])
    assert other.wait(PATIENCE_S)
    assert other.mask()


async def test_when_the_process_that_forks_dies_there_is_another_one(bench: Bench) -> None:
    guide = await bench.guide(ConstString("a"))
    before = bench.fork_server
    os.kill(before, signal.SIGKILL)
    assert guide.forced(9) == [ord("a")], "workers live on"
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(RequestError):  # it may have taken the order before it died
                assert (await bench.guide(ConstString("b"))).forced(9) == [ord("b")]
                break
    assert bench.fork_server != before


async def test_a_stopped_worker_is_ended_and_its_request_told_to_come_again(bench: Bench) -> None:
    other = await bench.guide(ConstString("a"))
    (others,) = bench.processes
    endless = bench.compile(ENDLESS)
    await bench.until_there_are(2)
    server, stopped = bench.fork_server, next(each for each in bench.processes if each != others)
    os.kill(stopped, signal.SIGSTOP)
    assert "does not answer; send the request again" in await bench.refusal(endless)
    await bench.until_there_are(1)
    assert bench.processes == [others]
    assert (await bench.guide(ConstString("b"))).forced(9) == [ord("b")]
    assert bench.fork_server == server
    assert other.forced(9) == [ord("a")]


async def test_a_worker_that_was_stopped_while_it_was_kept_is_replaced(bench: Bench) -> None:
    first = await bench.grammar(ConstString("a"))
    (kept,) = bench.processes
    os.kill(kept, signal.SIGSTOP)  # before it is asked for the next beginning, which it may have at once
    first.release()
    await asyncio.sleep(0)
    compiling = bench.compile(ConstString("a"))
    while not bench.workers._compiling:
        await asyncio.sleep(0)
    bench.later_s += 100.0
    grammar = await asyncio.wait_for(asyncio.wrap_future(compiling), PATIENCE_S)
    guide = grammar.guide()
    assert guide is not None
    assert guide.forced(9) == [ord("a")]
    await bench.until_there_are(1)  # a process that ends closes its channel first
    assert kept not in bench.processes


async def test_a_stopped_fork_server_is_ended_and_the_next_format_starts_another(bench: Bench) -> None:
    guide = await bench.guide(ConstString("a"))
    server = bench.fork_server
    os.kill(server, signal.SIGSTOP)
    compiling = bench.compile(ConstString("b" * (4 << 20)))  # more than its connection holds
    while not bench.workers._compiling:
        await asyncio.sleep(0)
    assert "does not answer; send the request again" in await bench.refusal(compiling)
    assert guide.forced(9) == [ord("a")], "workers live on"
    assert (await bench.guide(ConstString("c"))).forced(9) == [ord("c")]
    assert bench.fork_server != server


async def test_a_tokenizer_file_that_is_gone_is_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match="tokenizer cannot be read again"):
        await bench.grammar(ConstString("a"))


async def test_everything_ends_when_the_runner_does(bench: Bench) -> None:
    guide = await bench.guide(ConstString("a"))
    endless = bench.compile(ENDLESS)
    await bench.until_there_are(2)
    processes = [bench.fork_server, *bench.processes]
    assert bench.workers._fork_server is not None
    child = bench.workers._fork_server.result().child
    assert child is not None
    child.connection.close()
    guide.source.channel.close()  # type: ignore[attr-defined]  # it is a worker
    with pytest.raises(RequestError):
        await asyncio.wait_for(asyncio.wrap_future(endless), PATIENCE_S)
    child.process.wait(PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while any(os.path.exists(f"/proc/{process}") for process in processes):  # noqa: ASYNC240, PTH110
            await asyncio.sleep(0.05)
    bench.workers._fork_server = None


UNREADABLE = "its grammar process sent an unreadable message: send it again"


@pytest.mark.parametrize(
    "body",
    [b"\xc1\xff\x00", msgspec.msgpack.encode(State(error="a"))[:-1], b"\x92\x01\x02"],
    ids=["no MessagePack", "cut off", "of another type"],
)
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
        patch.setattr(child_module, "_PROGRAM", "import time; time.sleep(600)")
        patch.setattr(worker_module, "_START_S", 0.1)
        with pytest.raises(RequestError, match=r"^Format: the compiler process was not ready within 0\.1 s$"):
            await bench.grammar(ConstString("a"))
    assert (await bench.guide(ConstString("a"))).forced(9) == [ord("a")]


def test_an_order_without_a_descriptor_has_no_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "send_fds")  # macOS cannot receive an empty list
    near, far = socket.socketpair()
    with near, far:
        ForkServer(SimpleNamespace(connection=near)).order(KILL, 7)  # type: ignore[arg-type]
        assert far.recv(99) == ORDER.pack(KILL, 7)
