"""The sweep keeps all models within one bound, and touches nothing but segments."""

import errno
import fcntl
import os
from pathlib import Path
from random import Random

import pytest

from runner.cache.disk.shelf import Shelf
from runner.cache.disk.sweep import Sweep
from tests.unit.cache.disk.made import NAMESPACE, STORY, FakeFiles, listed, named, shelf, swept


def test_all_models_share_one_bound_and_the_longest_idle_goes_first(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = shelf(tmp_path, files)
    other = Shelf(files, tmp_path, NAMESPACE.replace("0", "1"), b"{}", 1 << 40)
    other.open()
    for each in STORY[:3]:
        opened.publish(each)
        opened.touch(each.name)
        files.now += 100
    size = swept(files, tmp_path).last.nbytes
    assert size == sum(file.stat().st_size for file in opened.folder.iterdir()) + 2
    found = swept(files, tmp_path, size - 1).last
    assert 0 < found.removed < 3
    assert found.nbytes <= size - 1
    assert not (opened.folder / STORY[0].name.file).exists()
    assert swept(files, tmp_path, 0).last.files == 0
    assert swept(files, tmp_path / "nothing").last.nbytes == 0


def test_leaves_go_before_what_they_hang_from(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = shelf(tmp_path, files)
    for each in (STORY[0], STORY[2]):
        opened.publish(each)
        opened.touch(each.name)
    swept(files, tmp_path, swept(files, tmp_path).last.nbytes - 1)
    assert (opened.folder / STORY[0].name.file).exists()
    assert not (opened.folder / STORY[2].name.file).exists()


def test_what_is_old_abandoned_or_of_another_format_goes_and_nothing_else(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = shelf(tmp_path, files)
    opened.publish(STORY[0])
    opened.touch(STORY[0].name)
    former = tmp_path / f"v0-{'0' * 32}"
    former.mkdir()
    (former / STORY[0].name.file).write_bytes(b"old")
    mine = [tmp_path / "notes.txt", opened.folder / "letter.txt", tmp_path / "photos" / STORY[0].name.file]
    abandoned = [opened.folder / ".77-1.tmp"]
    mine[2].parent.mkdir()
    for path in (*mine, *abandoned):
        path.write_text("x")
        os.utime(path, (files.now, files.now))
    files.now += 10
    assert swept(files, tmp_path, age=11).last.files == 1
    assert abandoned[0].exists()  # somebody may still be writing it
    assert not former.exists()
    files.now += 4000
    assert swept(files, tmp_path, age=11).last.files == 0
    assert not abandoned[0].exists()
    assert all(path.exists() for path in mine)


def test_a_sweep_follows_no_links(tmp_path: Path) -> None:
    """A directory in which somebody has put links to what is his own."""
    files = FakeFiles()
    elsewhere = tmp_path / "elsewhere"
    opened = shelf(elsewhere, files)
    opened.publish(STORY[0])
    directory = tmp_path / "kept"
    directory.mkdir()
    for version in (0, 1):
        (directory / f"v{version}-{'5' * 32}").symlink_to(opened.folder)
    mine = shelf(directory, files)
    (mine.folder / STORY[2].name.file).symlink_to(opened.folder / STORY[0].name.file)
    (mine.folder / STORY[3].name.file).mkdir()
    swept(files, directory, 0, age=0)
    assert sorted(listed(elsewhere)) == sorted(["about.json", STORY[0].name.file])


def test_what_cannot_be_removed_still_counts_and_others_go_for_it(tmp_path: Path) -> None:
    class Stubborn(FakeFiles):
        def unlink(self, path: Path) -> None:
            if path.name == STORY[2].name.file:
                raise PermissionError(errno.EPERM, "immutable")
            super().unlink(path)

    files = Stubborn()
    opened = shelf(tmp_path, files)
    for each in (STORY[0], STORY[2]):
        opened.publish(each)
        opened.touch(each.name)
    size = (opened.folder / STORY[2].name.file).stat().st_size + (opened.folder / "about.json").stat().st_size
    found = swept(files, tmp_path, size * 17 // 16).last
    assert (found.files, found.removed, found.nbytes) == (1, 1, size)
    assert sorted(listed(tmp_path)) == sorted(["about.json", STORY[2].name.file])


def test_the_longest_idle_of_very_many_go_first(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = shelf(tmp_path, files)
    order = [*range(3000)]
    Random(1).shuffle(order)
    for idle_s, index in enumerate(order):
        path = opened.folder / named([index, 1], 0, 2).file
        path.write_bytes(b"xxxx")
        os.utime(path, (files.now - idle_s, files.now - idle_s))
    swept(files, tmp_path, 8000)
    left = {index for index in order if (opened.folder / named([index, 1], 0, 2).file).exists()}
    assert left == set(order[: len(left)])
    assert 1700 < len(left) <= 2000


def test_a_volume_that_is_nearly_full_counts_as_a_bound(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = shelf(tmp_path, files)
    opened.publish(STORY[0])
    files.free = (1 << 30, 1 << 40)
    assert swept(files, tmp_path).last.files == 0


@pytest.mark.parametrize("rests", [3, 1000])
def test_two_processes_count_one_after_the_other(rests: int, tmp_path: Path) -> None:
    """Who is stopped while it counts keeps nobody waiting for long."""

    class Waiting(FakeFiles):
        def rest(self) -> None:
            self.calls.append("rest")
            if self.calls.count("rest") == rests:
                os.close(other)

    tally = tmp_path / "tally"
    other = os.open(tally, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    files = Waiting()
    files.exchange(tally, lambda data: data + b"x")
    files.exchange(tally, lambda data: data + b"y")
    assert tally.read_bytes() == b"xy"
    assert files.calls.count("rest") == min(rests, 100)
    if rests > 100:
        os.close(other)


def test_a_sweep_stops_now_and_then_for_more_urgent_things(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = shelf(tmp_path, files)
    for index in range(600):
        (opened.folder / named([index, 1], 0, 2).file).write_bytes(b"")
    sweep = Sweep(files, tmp_path, 1 << 40, 1e12)
    assert sum(1 for _ in sweep.run()) >= 2
    assert sweep.last.files == 600
