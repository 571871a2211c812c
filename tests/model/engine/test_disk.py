"""The disk cache over the real scheduler: requests wait for the disk, and writing comes between slices."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest

import runner.disk.restores
import runner.disk.writer
from runner.cache.sketch import Sketch
from runner.cache.trie_cache import TrieCache
from runner.disk.files import Files
from runner.disk.restores import Restores
from runner.disk.segment_reader import Reader
from runner.disk.serialize import forms_of
from runner.disk.sweep import Sweep
from runner.disk.thread import DiskThread
from runner.disk.tier import DiskTier
from runner.disk.unsaved import UnsavedSegments
from runner.disk.writer import Writer
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, VOCAB, tiny
from tests.lib.tiny_engine import ClientRequest, Clock, RequestSpec, TinyEngine
from tests.unit.disk.made import NAMESPACE, ROOT, FakeFiles, store


def words(count: int, seed: int = 0) -> list[int]:
    return [(7 * index + 3 * seed + index * index) % VOCAB for index in range(count)]


class Process:
    """An engine with a disk cache. The disk thread works when it is told to."""

    def __init__(self, kind: str, directory: Path, files: Files | None = None, **options: int) -> None:
        self.engine = TinyEngine(kind, **options)  # type: ignore[arg-type]
        self.messages: deque[Callable[[], None]] = deque()
        self.clock = Clock()
        self.files = files or FakeFiles()
        self.store = store(directory, self.files)
        self.disk = DiskThread(
            self.files,
            self.store,
            Sweep(self.files, directory, 1 << 40, 1e12),
            Reader(self.store, ROOT),
            self.messages.append,
        )
        self.slow = False
        """True if the disk thread does nothing by itself."""
        scheduler, cache = self.engine.scheduler, self.engine.trie
        model = tiny(kind)
        self.token_s: float | None = 0.01
        """The time of a token, as far as requests have shown it."""
        self.restores = Restores(
            cache,
            self.disk,
            "",
            forms_of(Sketch(model.make_layers, model.logits, VOCAB)),
            model.logits,
            prefill_token_s=lambda: self.token_s,
            ready=lambda: setattr(scheduler.queue, "changed", True),
            clock=self.clock,
        )
        unsaved = UnsavedSegments(cache, self.store.index, NAMESPACE, ROOT, touch=self.disk.touch)
        self.writer = Writer(cache, self.disk, unsaved, clock=self.clock)
        self.tier = DiskTier(self.disk, self.restores, self.writer, scheduler)

    def ask(self, prompt: list[int], max_tokens: int = 4) -> ClientRequest:
        client = ClientRequest(self.engine.kind, RequestSpec(tuple(prompt), max_tokens, SamplingOptions()))
        self.engine.requests.append(client)
        self.tier.add(client.request)
        return client

    def step(self) -> bool:
        """Does what the engine does between two looks at its mailbox; returns False if it would wait."""
        if not self.slow:
            while self.disk.step():
                pass
        while self.messages:
            self.messages.popleft()()
        self.engine.advance()
        idle = self.engine.scheduler.idle
        if self.tier.pending(idle=idle):
            self.tier.advance(idle=idle, interrupted=lambda: bool(self.messages))
        return not (self.engine.scheduler.idle and not self.tier.pending(idle=True))

    def receive(self) -> None:
        """Waits for a message of the disk thread."""
        while not self.messages:
            assert self.disk.step()
        self.messages.popleft()()

    def run(self) -> None:
        """Goes on until nothing is left to do."""
        for _ in range(20_000):
            if not self.step() and not self.messages and (self.slow or not self.disk.step()) and not self.messages:
                return
        raise AssertionError("never idle")


def written(directory: Path, prompt: list[int]) -> Process:
    """Returns a process that has answered this prompt, and is idle."""
    process = Process("llama", directory)
    process.ask(prompt)
    process.run()
    return process


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_after_the_process_has_gone(kind: str, tmp_path: Path) -> None:
    first = Process(kind, tmp_path)
    asked = first.ask(words(500))
    first.run()
    first.engine.check()
    prompt = [*words(500), *asked.tokens, *words(20, 3)]

    second = Process(kind, tmp_path)
    again = second.ask(prompt)
    assert again.request.restoring
    second.run()
    second.engine.check()
    assert again.cached >= 480
    assert again.request.restored == second.tier.counts().restored_tokens == again.cached
    counts = second.tier.counts()
    assert (counts.restores, counts.state, counts.rejected) == (1, "on", {})
    assert counts.restored_tokens >= 480
    assert first.tier.counts().pending_tokens == 0


def test_others_pass_a_request_that_waits_for_the_disk(tmp_path: Path) -> None:
    written(tmp_path, words(500))
    second = Process("llama", tmp_path)
    second.slow = True
    waiting, other = second.ask(words(500)), second.ask(words(100, 5))
    second.run()
    assert other.finished
    assert not waiting.started
    assert second.tier.patience_s == pytest.approx(5.0)
    second.slow = False
    second.run()
    assert waiting.cached == 499
    second.engine.check()


def test_nobody_waits_for_the_disk_longer_than_computing_takes(tmp_path: Path) -> None:
    written(tmp_path, words(500))
    second = Process("llama", tmp_path)
    second.slow = True
    waiting = second.ask(words(500))
    second.run()
    assert not waiting.started
    second.clock.now += 5.0
    assert second.tier.patience_s == 0.0
    second.run()
    assert waiting.cached == 0
    assert not second.ask(words(300)).request.restoring  # so slow a disk is not asked for a while
    second.slow = False
    second.run()  # what is read now is not wanted any more
    asked = [second.ask(words(300, seed)).request.restoring for seed in range(1, 16)]
    assert asked == [False] * 14 + [True]
    second.run()
    second.engine.check()


def test_a_first_request_waits_for_a_disk_that_hangs_no_longer_than_computing_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request has shown how long that is: the engine tries it."""
    written(tmp_path, words(500))
    second = Process("llama", tmp_path)
    second.token_s, second.slow = None, True
    monkeypatch.setattr(second.restores, "_time_token", lambda: 0.002)
    waiting = second.ask(words(500))
    second.run()
    assert second.tier.patience_s == pytest.approx(0.1)
    second.clock.now += 0.1
    second.run()
    assert second.tier.patience_s == pytest.approx(0.9)
    assert not waiting.started
    second.clock.now += 0.9
    second.run()
    assert waiting.finished
    assert caplog.text.count("the disk cache is slow") == 1

    second.token_s = 1.0  # so slow is not even this disk
    for _ in range(17):
        request = second.ask(words(300, 5)).request
        assert not request.restoring  # but its thread has not come back
        request.cancel()
    second.slow = False
    second.run()
    assert second.ask(words(500)).request.restoring is False  # in memory
    second.engine.trie.detach()
    again = second.ask(words(500))
    assert again.request.restoring
    second.run()
    assert again.cached == 499
    second.engine.check()


def test_a_file_that_cannot_be_adopted_is_removed(tmp_path: Path) -> None:
    first = written(tmp_path, words(500))
    held = {path.name for path in first.store.folder.iterdir()}

    second = Process("llama", tmp_path)
    asked = second.ask(words(500))
    with patch.object(runner.disk.restores, "insert_restored", side_effect=ValueError):
        second.run()
    assert asked.cached == 0
    assert second.tier.counts().state == "on"
    assert second.store.rejected == {"layers": 1}
    assert {path.name for path in second.store.folder.iterdir()} == held  # written anew
    second.engine.check()


def test_what_was_read_in_time_is_taken_although_the_engine_was_busy(tmp_path: Path) -> None:
    """A slice of another request may take longer than a request waits for the disk."""
    written(tmp_path, words(1000))
    second = Process("llama", tmp_path)
    waiting = second.ask(words(1000))
    while second.disk.step():
        pass
    second.clock.now += 11.0
    second.run()
    assert waiting.cached == 512  # two segments were read ahead, and no more is read now
    second.engine.check()


@pytest.mark.parametrize("length", [300, 1107])
def test_a_prompt_is_on_disk_when_its_answer_ends(length: int, tmp_path: Path) -> None:
    """A host with keep_alive 0 kills the process with the last token of an answer, which has taken a second."""
    process, most = Process("llama", tmp_path), 0
    asked = process.ask(words(length), max_tokens=300)
    while not asked.finished:
        process.clock.now += 1 / 300
        process.step()
        most = max([most, *(len(session.node.path()) for session in process.engine.trie.sequences.sessions)])
    assert most == 2  # its root and one node: what is live in layers costs every forward
    process.engine.check()

    second = Process("llama", tmp_path)
    again, talk = second.ask(words(length)), second.ask([*words(length), *asked.tokens])
    second.run()
    assert length - 256 < again.cached
    assert length + 300 - 512 < talk.cached  # a step more may be on its way


def test_what_a_slice_makes_is_on_its_way_at_once_and_only_once(tmp_path: Path) -> None:
    process = Process("llama", tmp_path)
    process.slow = True
    asked = process.ask(words(2000))
    while not asked.tokens:
        process.clock.now += 10.0
        assert process.step()
    assert [copy.facts.name.stop for copy in process.writer.unsaved.sent] == [*range(256, 2000, 256)]
    assert process.tier.counts().pending_tokens == 1792
    process.store._paused_until_s = process.files.now_s() + 60
    process.slow = False
    process.run()  # nothing can be written
    assert process.tier.counts().pending_tokens > 2000
    cast("FakeFiles", process.files).now += 61
    process.run()
    assert process.tier.counts().pending_tokens == 0
    second = Process("llama", tmp_path)
    again = second.ask(words(2000))
    second.run()
    assert again.cached == 1999


def test_what_is_on_its_way_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.disk.writer, "_AT_ONCE_BYTES", 1)
    process = Process("llama", tmp_path)
    process.slow = True
    process.ask(words(1000))
    process.run()
    assert len(process.writer.unsaved.sent) == 1
    process.slow = False
    process.run()
    assert process.tier.counts().pending_tokens == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_process_that_is_to_end_leaves_all_that_it_has_computed(kind: str, tmp_path: Path) -> None:
    process = Process(kind, tmp_path)
    one, other = process.ask(words(300), max_tokens=50), process.ask(words(280, 5), max_tokens=50)
    while min(len(one.tokens), len(other.tokens)) < 8:
        assert process.step()
    process.tier.keep(process.receive)

    second = Process(kind, tmp_path)
    for asked, prompt in ((one, words(300)), (other, words(280, 5))):
        again = second.ask([*prompt, *asked.tokens, 1, 2])
        second.run()
        assert again.cached >= len(prompt) + len(asked.tokens) - 1
    second.engine.check()


def test_writing_takes_no_more_than_its_share_of_the_time_that_others_compute(tmp_path: Path) -> None:
    process = Process("llama", tmp_path)
    first, other = process.ask(words(600)), process.ask(words(400, 7), max_tokens=200)
    while not first.finished or len(other.tokens) < 50:  # no time passes: there is none to share
        assert process.step()
    assert process.store.written_bytes == 0
    while len(other.tokens) < 100:
        process.clock.now += 1.0
        assert process.step()
    assert process.store.written_bytes > 0


def test_an_engine_whose_disk_rests_does_too(tmp_path: Path) -> None:
    """Even in the middle of a copy: there is nothing to do until the disk writes again."""
    process = Process("llama", tmp_path)
    files = cast("FakeFiles", process.files)
    for _ in range(2):
        process.store._paused_until_s = files.now_s() + 60
        if not process.engine.requests:
            process.ask(words(400))
        process.run()
        assert not process.tier.pending(idle=True)
        files.now += 61
        assert process.tier.pending(idle=True)
        process.tier.advance(idle=True, interrupted=lambda: True)
        assert process.writer._copying is not None
    process.run()
    assert process.tier.counts().pending_tokens == 0


def test_a_fault_of_its_own_code_switches_the_tier_off(tmp_path: Path) -> None:
    process = written(tmp_path, words(400))
    process.engine.trie.detach()
    asked = process.ask(words(400))
    with (
        patch.object(runner.disk.restores, "insert_restored", side_effect=KeyError),
        patch.object(TrieCache, "detach", side_effect=KeyError),
    ):
        process.run()
    assert process.tier.counts().state == "off"
    process.ask(words(300, 5))
    process.run()
    assert asked.cached == 0
    process.engine.check()


def test_a_fault_of_the_thread_costs_no_answer(tmp_path: Path) -> None:
    process = written(tmp_path, words(400))
    process.engine.trie.detach()
    process.slow = True
    process.ask(words(400))
    with patch.object(Reader, "read_prompt", side_effect=KeyError):
        process.disk._run()
    process.run()
    assert process.tier.counts().state == "off"
    process.ask(words(300, 5))
    process.run()
    process.engine.check()
