"""The sweep keeps all models within one bound, and touches nothing but segments."""

import fcntl
import os
from pathlib import Path

import pytest

from runner.disk.store import SegmentStore
from tests.unit.disk.made import NAMESPACE, STORY, FakeFiles, listed, store, swept


def test_all_models_share_one_bound_and_the_longest_idle_goes_first(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = store(tmp_path, files)
    other = SegmentStore(files, tmp_path, NAMESPACE.replace("0", "1"), b"{}", 1 << 40)
    other.open()
    for each in STORY[:3]:
        opened.publish(each)
        opened.touch(each.name)
        files.now += 100
    size = swept(files, tmp_path).held_bytes
    assert size == sum(file.stat().st_size for file in opened.folder.iterdir()) + 2
    assert 0 < swept(files, tmp_path, size - 1).held_bytes <= size - 1
    assert 1 < len(listed(tmp_path)) < 4
    assert not (opened.folder / STORY[0].name.file).exists()
    swept(files, tmp_path, 0)
    assert listed(tmp_path) == ["about.json"]
    assert swept(files, tmp_path / "nothing").held_bytes == 0


def test_leaves_go_before_what_they_hang_from(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = store(tmp_path, files)
    for each in (STORY[0], STORY[2]):
        opened.publish(each)
        opened.touch(each.name)
    swept(files, tmp_path, swept(files, tmp_path).held_bytes - 1)
    assert (opened.folder / STORY[0].name.file).exists()
    assert not (opened.folder / STORY[2].name.file).exists()


def test_what_is_old_abandoned_or_of_another_format_goes_and_nothing_else(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = store(tmp_path, files)
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
    swept(files, tmp_path, age=11)
    assert STORY[0].name.file in listed(tmp_path)
    assert abandoned[0].exists()  # somebody may still be writing it
    assert not former.exists()
    files.now += 4000
    swept(files, tmp_path, age=11)
    assert STORY[0].name.file not in listed(tmp_path)
    assert not abandoned[0].exists()
    assert all(path.exists() for path in mine)


def test_a_sweep_follows_no_links(tmp_path: Path) -> None:
    """A directory in which somebody has put links to what is his own."""
    files = FakeFiles()
    elsewhere = tmp_path / "elsewhere"
    opened = store(elsewhere, files)
    opened.publish(STORY[0])
    directory = tmp_path / "kept"
    directory.mkdir()
    for version in (0, 1):
        (directory / f"v{version}-{'5' * 32}").symlink_to(opened.folder)
    mine = store(directory, files)
    (mine.folder / STORY[2].name.file).symlink_to(opened.folder / STORY[0].name.file)
    (mine.folder / STORY[3].name.file).mkdir()
    swept(files, directory, 0, age=0)
    assert sorted(listed(elsewhere)) == sorted(["about.json", STORY[0].name.file])


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
