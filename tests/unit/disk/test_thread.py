"""The disk thread, a piece of work at a time."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path

import pytest

from runner.disk.segment import Segment, sealed
from runner.disk.segment_reader import FoundSegment, Reader, Wanted
from runner.disk.sweep import Sweep
from runner.disk.thread import DiskThread, Reading
from tests.unit.disk.made import LAYERS, ROOT, FakeFiles, segment, store

TOKENS = [7 * index % 1000 for index in range(1100)]


class Thread(DiskThread):
    """A thread that works when it is told to."""

    def __init__(self, directory: Path, most: int = 1 << 40) -> None:
        self.files = FakeFiles()
        self.messages: deque[Callable[[], None]] = deque()
        kept = store(directory, self.files)
        sweep = Sweep(self.files, directory, most, 1e12)
        super().__init__(self.files, kept, sweep, Reader(kept, ROOT), self.messages.append)

    def rest(self) -> None:
        """Works until there is nothing to do, and delivers its messages."""
        while self.step():
            pass
        while self.messages:
            self.messages.popleft()()

    def put(self, *segments: Segment) -> list[bool]:
        """Writes segments; returns what became of each."""
        done: list[bool] = []
        for each in segments:
            self.write(each, done.append)
        self.rest()
        return done


def cut(stop: int = 768) -> list[Segment]:
    return [segment(TOKENS, start, start + 256) for start in range(0, stop, 256)]


def wanted(held: int = 0) -> Wanted:
    return Wanted(array("i", TOKENS), "", held, lambda at: at - 1, LAYERS)


def test_what_was_written_is_read_in_order_and_two_pieces_ahead(tmp_path: Path) -> None:
    thread = Thread(tmp_path)
    assert thread.put(*cut()) == [True] * 3
    taken: list[FoundSegment | None] = []
    reading = Reading(wanted(), taken.append)
    thread.look_for(reading)
    thread.rest()
    assert [found.segment.name.start for found in taken if found] == [0, 256]
    thread.taken(reading)
    thread.rest()
    assert len(taken) == 3
    thread.taken(reading)
    thread.rest()
    assert taken[-1] is None
    assert [bytes(found.segment.data) for found in taken if found] == [bytes(each.data) for each in cut()]


def test_a_segment_is_read_into_the_buffer_that_the_engine_gives(tmp_path: Path) -> None:
    thread = Thread(tmp_path)
    thread.put(*cut(1024))
    taken: list[FoundSegment | None] = []
    reading = Reading(wanted(), taken.append)
    thread.look_for(reading)
    thread.rest()
    small, large = memoryview(bytearray(1000)), memoryview(bytearray(99_000))
    for buffer in (large, small):
        thread.taken(reading, buffer)
        thread.rest()
    first, second, third, fourth = [found.segment for found in taken if found]
    assert third.data.obj is large.obj
    assert third.data == large[: len(third.data)]
    assert all(isinstance(each.data.obj, mmap) for each in (first, second, fourth))
    assert [bytes(each.data) for each in (first, second, third, fourth)] == [bytes(each.data) for each in cut(1024)]
    thread.taken(reading, large)
    thread.rest()
    assert taken[-1] is None
    assert not thread.store.buffers
    thread.taken(reading, large)  # too late: nothing more is read
    assert not thread.store.buffers


def test_reads_go_before_writes_and_writes_before_sweeps(tmp_path: Path) -> None:
    thread, order = Thread(tmp_path), list[str]()
    thread.put(*cut(512))
    thread.files.now += 61
    thread.write(segment(TOKENS, 512, 768), lambda _: order.append("written"))
    thread.look_for(Reading(wanted(), lambda _: order.append("read")))
    calls = len(thread.files.calls)
    thread.rest()
    assert order == ["read", "read", "written"]
    assert "entries" in thread.files.calls[calls:]


def test_a_segment_is_written_though_prompts_keep_coming(tmp_path: Path) -> None:
    thread = Thread(tmp_path)
    done: list[bool] = []
    thread.put(cut()[0])
    thread.write(cut()[1], done.append)
    for _ in range(9):
        thread.look_for(Reading(wanted(), lambda _: None))
        thread.step()
        thread.messages.pop()()
    assert done == [True], "after eight reads"


def test_a_reading_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    thread = Thread(tmp_path)
    thread.put(*cut())
    taken: list[FoundSegment | None] = []
    reading = Reading(wanted(), taken.append)
    reading.dropped, reading.credit = True, 0
    thread.look_for(reading)
    thread.rest()
    assert taken == [None]
    assert thread.store.read_bytes == 0


def folder_bytes(thread: Thread) -> int:
    return sum(path.stat().st_size for path in thread.store.folder.iterdir())


def others(count: int, first: int = 2000) -> Iterator[Segment]:
    """Yields segments of as many conversations."""
    return (segment([first + number, *TOKENS], 0, 256) for number in range(count))


SIZE = len(b"".join(sealed(next(others(1)))))
TALLIES = [None, b"", b"x", bytes(24), bytes(28), b"\xff" * 28, bytes(99)]


@pytest.mark.parametrize("tally", TALLIES, ids=repr)
def test_the_bound_holds_at_all_times(tally: bytes | None, tmp_path: Path) -> None:
    """No time passes: room is made before each segment, whatever the tally says."""
    first = Thread(tmp_path, 4 * SIZE)
    assert first.put(*others(3)) == [True] * 3
    if tally is None:
        (tmp_path / "tally").unlink()
    else:
        (tmp_path / "tally").write_bytes(tally)
    thread, done = Thread(tmp_path, 4 * SIZE), list[bool]()
    for each in others(9, 3000):
        thread.write(each, done.append)
    most = 0
    while thread.step():
        most = max(most, folder_bytes(thread))
    thread.rest()
    assert done == [True] * 9
    assert 2 * SIZE < most <= 4 * SIZE
    assert set(thread.store.index.names) == {path.name for path in thread.store.folder.glob("*.kv")}
    assert thread.sweep.evicted_bytes >= 8 * SIZE


def test_a_volume_that_others_fill_makes_room_though_nothing_can_be_written(tmp_path: Path) -> None:
    thread = Thread(tmp_path)
    thread.put(*cut(512))
    thread.files.free, calls = (1 << 30, 4 << 30), len(thread.files.calls)
    assert thread.put(cut()[2]) == [False]
    assert "write" not in thread.files.calls[calls:]
    assert thread.sweep.held_bytes < SIZE
    assert not thread.store.write_errors
    assert not thread.store.may_write
    thread.files.free = (3 << 30, 4 << 30)
    thread.files.now += 61
    assert thread.put(cut()[2]) == [True]


def _filled(directory: Path) -> Thread:
    thread = Thread(directory)
    thread.put(*cut())
    return thread


def test_a_start_reads_no_file_however_many_there_are(tmp_path: Path) -> None:
    thread = _filled(tmp_path)
    again = Thread(tmp_path)
    again.rest()
    assert len(again.store.index.names) == 3
    assert not {"open", "read"} & set(again.files.calls)
    assert thread.store.index.names.keys() == again.store.index.names.keys()


def test_the_bound_holds_over_two_processes_and_what_is_evicted_is_not_looked_for(tmp_path: Path) -> None:
    """Each may be above it by the segment that it is writing."""
    threads = [Thread(tmp_path, 4 * SIZE) for _ in range(2)]
    for index, thread in enumerate(threads):
        for each in others(8, 2000 + 1000 * index):
            thread.write(each, lambda _: None)
    most, worked = 0, True
    while worked:
        steps = [thread.step() for thread in threads]
        worked = any(steps)
        most = max(most, folder_bytes(threads[0]))
    assert 2 * SIZE < most <= 5 * SIZE
    assert sum(thread.store.written_bytes for thread in threads) > 15 * SIZE
    assert folder_bytes(threads[0]) <= threads[0].sweep.held_bytes <= 4 * SIZE
    threads[0].files.now += 61
    threads[0].store.relist()
    assert set(threads[0].store.index.names) == {path.name for path in threads[0].store.folder.glob("*.kv")}
