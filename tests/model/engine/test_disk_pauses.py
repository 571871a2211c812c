"""Copying for the disk holds nobody up for more than two milliseconds, and what is written is the same."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from runner.disk import serialize, unsaved
from runner.disk.serialize import Part
from scripts.tools.models.tiny import KINDS
from tests.model.engine.test_disk import Process, words

PIECE = 1024
"""Of the layers of tiny models; on this clock it takes a millisecond."""
MOST_S = 0.002


def files(process: Process) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in process.store.folder.iterdir()}


class Paused(Process):
    """A process whose clock goes on by what is copied. It notes how long each turn of the disk cache takes; in each, a
    message waits."""

    def __init__(self, kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(kind, directory)
        self.pauses_s: list[float] = []
        for module in (unsaved, serialize):
            monkeypatch.setattr(module, "PIECE_BYTES", PIECE)

        def copy_tokens(part: Part, into: memoryview, first: int, count: int, *, on_device: bool) -> None:
            serialize.copy_tokens(part, into, first, count, on_device=on_device)
            low, high = part.span or (0, part.array.shape[-2])
            self.clock.now += len(into) * (high - low) / count / PIECE / 1000

        def copy_piece(array: mx.array, into: memoryview, at: int, *, on_device: bool) -> int:
            stop = serialize.copy_piece(array, into, at, on_device=on_device)
            self.clock.now += (stop - at) / PIECE / 1000
            return stop

        monkeypatch.setattr(unsaved, "copy_tokens", copy_tokens)
        monkeypatch.setattr(unsaved, "copy_piece", copy_piece)
        advance = self.tier.advance

        def timed(*, idle: bool, interrupted: Callable[[], bool]) -> None:
            began_s = self.clock.now
            advance(idle=idle, interrupted=lambda: True)
            self.pauses_s.append(self.clock.now - began_s)

        monkeypatch.setattr(self.tier, "advance", timed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_waits_for_a_piece(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Process(kind, tmp_path / "whole")
    whole.ask(words(500))
    whole.run()

    process = Paused(kind, tmp_path / "pieces", monkeypatch)
    process.ask(words(500))
    process.run()
    assert max(process.pauses_s) <= MOST_S
    assert len(process.pauses_s) > process.store.written_bytes / PIECE / 2
    assert files(process) == files(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_waits_no_longer_than_two_milliseconds(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Paused(kind, tmp_path, monkeypatch)
    process.ask(words(500))
    process.engine.finish()  # nothing is written yet
    other, begun = process.ask(words(250, 7), max_tokens=300), process.store.written_bytes
    while len(other.tokens) < 290:
        process.clock.now += 0.1  # of a slice
        assert process.step()
    assert process.store.written_bytes > begun
    assert 0 < max(process.pauses_s) <= MOST_S
