"""Whatever happens to the files: what is found is what was written, and nothing is left behind."""

import errno
from pathlib import Path

import pytest

from runner.disk.files import Files
from runner.disk.segment import is_temporary, parse_name
from runner.disk.store import SegmentStore
from runner.disk.sweep import Sweep
from tests.unit.disk.made import ERRORS, LAYERS, NAMESPACE, STORY, CrashError, FakeFiles, listed, store, swept


def story(files: Files, directory: Path) -> SegmentStore:
    """Sweeps, writes, reads, looks, touches and sweeps again."""
    opened, sweep = store(directory, files), Sweep(files, directory, 1 << 40, 1e9)
    for _ in sweep.run():
        pass
    for each in STORY:
        opened.publish(each, sweep.reserve)
        opened.read_segment(each.name, LAYERS)
        opened.read_segment(each.name, LAYERS, only_tokens=True)
        opened.touch(each.name)
    for _ in sweep.run():
        pass
    return opened


def check_found(directory: Path, after_sweep: bool = True) -> int:
    """Checks that whatever is found equals what was written. Returns how much."""
    files, found = FakeFiles(), 0
    files.now = 3e9  # long after everything that was abandoned
    opened = store(directory, files)
    for each in STORY:
        read = opened.read_segment(each.name) if each.name in opened.index else None
        if read is not None:
            assert bytes(read.data) == bytes(each.data)
            found += 1
    assert not opened.rejected
    if after_sweep:
        for _ in Sweep(files, directory, 1 << 40, 1e12).run():
            pass
        left = listed(directory) if (directory / NAMESPACE).exists() else []
        assert not [name for name in left if is_temporary(name)]
        assert all(parse_name(name) or name == "about.json" for name in left)
    return found


def count_calls(directory: Path) -> int:
    files = FakeFiles()
    story(files, directory)
    assert check_found(directory) == len(STORY)
    return len(files.calls)


def test_a_crash_at_any_call_leaves_whole_segments_or_none(tmp_path: Path) -> None:
    calls = count_calls(tmp_path / "whole")
    assert calls > 60
    for at in range(calls):
        directory = tmp_path / str(at)
        with pytest.raises(CrashError):
            story(FakeFiles(at, CrashError()), directory)
        check_found(directory)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error.errno])
def test_an_error_at_any_call_raises_nothing(tmp_path: Path, error: OSError) -> None:
    for at in range(count_calls(tmp_path / "whole")):
        directory = tmp_path / str(at)
        story(FakeFiles(at, error), directory)
        check_found(directory)


def test_short_counts_are_gone_on_with(tmp_path: Path) -> None:
    files = FakeFiles()
    files.most_at_once = 100
    story(files, tmp_path)
    assert check_found(tmp_path) == len(STORY)


def test_a_full_disk_is_left_alone_for_a_while_and_a_broken_one_for_good(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = store(tmp_path, files)
    files.at, files.fault = len(files.calls) + 3, OSError(errno.ENOSPC, "full")
    assert not opened.publish(STORY[0])
    assert not opened.may_write
    files.now += 61
    assert opened.may_write
    assert opened.publish(STORY[0])
    files.at, files.fault = len(files.calls) + 3, OSError(errno.EROFS, "read-only")
    assert not opened.publish(STORY[2])
    files.now += 1e6
    assert not opened.may_write
    assert opened.read_segment(STORY[0].name) is not None
    assert sorted(listed(tmp_path)) == sorted(["about.json", STORY[0].name.file])


def test_a_file_in_the_place_of_a_folder_ends_writing(tmp_path: Path) -> None:
    (tmp_path / NAMESPACE).write_text("mine")
    opened = store(tmp_path)
    assert not opened.may_write
    assert opened.why_not_writing
    assert not opened.index.names
    swept(FakeFiles(), tmp_path, 0)
    assert (tmp_path / NAMESPACE).read_text() == "mine"
    assert (tmp_path / NAMESPACE).read_text() == "mine"


def test_what_another_process_of_the_same_number_left_is_not_in_the_way(tmp_path: Path) -> None:
    """In a container every runner may be process 1."""
    names = set[str]()

    class Noting(FakeFiles):
        def create(self, path: Path) -> int:
            assert path.name not in names
            names.add(path.name)
            return super().create(path)

    for count, each in enumerate(STORY):
        assert store(tmp_path, Noting()).publish(each)
        assert len(names) == 2 + count
        (tmp_path / NAMESPACE / min(names)).touch()


def test_what_may_be_written_in_a_day_is_limited(tmp_path: Path) -> None:
    files = FakeFiles()
    opened = store(tmp_path, files, most_written=1)
    assert opened.may_write
    assert opened.publish(STORY[0])
    assert not opened.may_write
    files.now += 86_401
    assert opened.may_write


def test_two_files_that_changed_places_are_misses(tmp_path: Path) -> None:
    opened = store(tmp_path)
    for each in STORY:
        opened.publish(each)
    one, other = (opened.folder / STORY[index].name.file for index in (2, 3))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert opened.read_segment(STORY[2].name) is None
    assert opened.read_segment(STORY[3].name, only_tokens=True) is None
    assert opened.rejected == {"tokens": 2}
    assert not one.exists()
    assert not other.exists()


def test_links_and_vanished_files_are_no_segments(tmp_path: Path) -> None:
    opened = store(tmp_path / "a")
    opened.publish(STORY[0])
    path = opened.folder / STORY[0].name.file
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert opened.read_segment(STORY[0].name) is None
    assert (tmp_path / "elsewhere").exists()
    assert not opened.rejected


def test_another_process_writes_too(tmp_path: Path) -> None:
    files = FakeFiles()
    one, other = store(tmp_path, files), store(tmp_path)
    other.publish(STORY[0])
    one.relist()
    assert STORY[0].name not in one.index  # not yet: it looked a moment ago
    files.now += 3
    one.relist()
    assert STORY[0].name in one.index
    assert one.publish(STORY[0])
    assert one.written_bytes == 0


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    opened = store(tmp_path / "new")
    opened.publish(STORY[0])
    assert (tmp_path / "new" / NAMESPACE).stat().st_mode & 0o777 == 0o700
    assert (opened.folder / STORY[0].name.file).stat().st_mode & 0o777 == 0o600
    assert not Files().is_private(Path("/tmp"))
    assert Files().is_private(tmp_path / "new")
