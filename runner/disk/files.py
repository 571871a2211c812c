"""The disk tier's calls to the operating system. Tests replace these calls to make every fault."""

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
_SHARED = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
_MOST_RESTS = 50  # the most waits for a lock; then the lock is ignored, since its process must have stopped


class FileEntry(NamedTuple):
    """A file in a directory."""

    name: str
    nbytes: int
    used_s: float
    """The time of its last modification or `touch`."""


class Files:
    """Calls for directories, files and the clock. An int is an open file. Any method may raise OSError."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory that only its owner may enter, unless it exists. Makes missing parents, too."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def is_private(self, path: Path) -> bool:
        """Returns True if the directory belongs to this user and nobody else may write to it."""
        found = path.stat()
        return found.st_uid == os.geteuid() and not found.st_mode & 0o022

    def is_folder(self, path: Path) -> bool:
        """Returns True for a directory that is not a symbolic link."""
        return path.is_dir() and not path.is_symlink()

    def changed_ns(self, path: Path) -> int:
        """Returns the time of the last change of a directory: an entry was added, renamed or removed."""
        return path.stat().st_mtime_ns

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)  # noqa: PTH208 - making a Path for each of 65,000 names is slower than the listing

    def plain(self, path: Path) -> list[str]:
        """Returns the names of the plain files in a directory: no links, pipes or directories."""
        with os.scandir(path) as found:
            return [each.name for each in found if each.is_file(follow_symlinks=False)]

    def entries(self, path: Path) -> Iterator[FileEntry]:
        """Yields the plain files of a directory. Leaves out a file that another process removes meanwhile."""
        with os.scandir(path) as found:
            for each in found:
                try:
                    if each.is_file(follow_symlinks=False):
                        status = each.stat(follow_symlinks=False)
                        yield FileEntry(each.name, status.st_size, status.st_mtime)
                except FileNotFoundError:
                    continue

    def space(self, path: Path) -> tuple[int, int]:
        """Returns the free bytes and all bytes of the volume that holds `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def exists(self, path: Path) -> bool:
        return path.exists()

    def rename(self, path: Path, to: Path) -> None:
        """Renames a file. Replaces a file that has the new name."""
        path.rename(to)

    def unlink(self, path: Path) -> None:
        """Removes a file, if it exists."""
        path.unlink(missing_ok=True)

    def touch(self, path: Path) -> None:
        os.utime(path, follow_symlinks=False)

    def exchange(self, path: Path, change: Callable[[bytes], bytes]) -> None:
        """Replaces the bytes of a small file by `change` of them, under a lock. Makes the file unless it exists."""
        file = os.open(path, _SHARED, 0o600)
        try:
            self._lock(file)
            os.pwrite(file, change(os.read(file, 1 << 10)), 0)
        finally:
            os.close(file)

    def _lock(self, file: int) -> None:
        for _ in range(_MOST_RESTS):
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.rest()
            except OSError:  # a volume without locks
                return None
        return None

    def create(self, path: Path) -> int:
        """Opens a new file that only its owner may read."""
        return os.open(path, _NEW, 0o600)

    def open(self, path: Path) -> int:
        """Opens a file for reading. Refuses a symbolic link. Does not wait for the other end of a pipe."""
        return os.open(path, _OLD)

    def size(self, file: int) -> int | None:
        """Returns the size of an open file in bytes, or None for a pipe, a device or a directory."""
        found = os.fstat(file)
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """Reads at most `len(into)` bytes from `offset` on. Returns the number of read bytes, 0 at the file's end."""
        return os.preadv(file, [into], offset)

    def write(self, file: int, data: memoryview) -> int:
        """Writes `data`, or only the first bytes of it. Returns the number of written bytes."""
        return os.write(file, data)

    def close(self, file: int) -> None:
        os.close(file)

    def now_s(self) -> float:
        """Returns the time, by the clock that also stamps files."""
        return time.time()

    def rest(self) -> None:
        """Lets other threads run Python for a moment."""
        time.sleep(0.0002)
