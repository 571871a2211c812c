"""Makes the private directory from which a host is started. The shim later replaces the host's executable in it.

    serve-RANDOM/bin/NAME    first Ollama's executable; the shim as soon as Ollama runs
    serve-RANDOM/bin/...     on macOS, symbolic links to all files beside the executable
    serve-RANDOM/lib/...     symbolic links to Ollama's libraries

Ollama and all processes that it starts inherit a lock on the directory. When no process holds it any more, a process
that waits for this, or the next start, removes the directory. `systemd-tmpfiles` spares locked directories.
"""

import errno
import fcntl
import grp
import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from runner.ollama.mlx_library import LIBRARY, write_library
from runner.ollama.plan import LaunchError, Plan
from runner.ollama.shim import shim

NAME = "ollama-mlx-runner"
PREFIX = "serve-"


class PrivateDirectory(NamedTuple):
    """A private directory. `name` is that of the executable; `lock` is the descriptor that holds the lock."""

    path: Path
    name: str
    lock: int

    @property
    def executable(self) -> Path:
        """The path that the host takes for that of its own executable."""
        return self.path / "bin" / self.name

    def replace(self) -> None:
        """Replaces `executable` by the shim."""
        (self.path / "shim").rename(self.executable)


def user_cache(environ: Mapping[str, str]) -> Path:
    """Returns the path of this project's folder in the user's cache. The folder need not exist."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):
        # If there is no home directory, the `~` stays, and `_own` refuses the place.
        cache = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")  # noqa: PTH111
    return Path(cache, NAME)


def places(environ: Mapping[str, str]) -> list[Path]:
    """Returns the folders for private directories, best first. /tmp may be cleaned while a server runs."""
    temporary = [Path(place, f"{NAME}-{os.geteuid()}") for place in (tempfile.gettempdir(), "/var/tmp")]
    return [user_cache(environ), *temporary]


def make_directory(plan: Plan, environ: Mapping[str, str]) -> PrivateDirectory:
    """Makes, fills and locks a directory in the first of `places` that allows this. Raises LaunchError if none does."""
    reasons = []
    for place in places(environ):
        try:
            directory = _make(_own(place), plan.ollama.name)
            try:
                _fill(directory, plan, environ)
            except OSError:
                shutil.rmtree(directory.path, ignore_errors=True)
                os.close(directory.lock)
                raise
        except OSError as error:
            reasons.append(f"\n  {place}: {error.strerror}")
        else:
            return directory
    raise LaunchError(
        f"there is no place for a small private directory:{''.join(reasons)}\n"
        "Set XDG_CACHE_HOME to a directory of your own in which programs may be executed."
    )


def lock(directory: Path, flags: int = 0) -> int:
    """Waits for the directory's lock and returns a descriptor with it. With LOCK_NB, BlockingIOError ends the wait."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link, which takes no space, or a copy if the kernel or the file system refuses a link."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o700)


def _own(place: Path) -> Path:
    """Makes the folder `place` if it does not exist, and returns its path without symbolic links. Raises
    PermissionError if other users could write into the folder, or put another one in its place."""
    if not place.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "you have no home directory")
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "is not a directory that only you can write to")
    found = place.resolve()
    for above in found.parents:
        if reason := _reason_to_distrust(above.stat()):
            raise PermissionError(errno.EPERM, f"lies in {above}, {reason}")
    return found


def _reason_to_distrust(above: os.stat_result) -> str:
    """Returns the reason why users other than this one and root can replace entries of the directory `above`; "" if
    they cannot. In a sticky directory such as /tmp, users cannot replace entries of others."""
    # The owner of `/` is root, even in a container in which root has another number.
    if above.st_uid not in (os.geteuid(), 0, Path("/").stat().st_uid):
        return "which belongs to another user"
    if above.st_mode & stat.S_ISVTX:
        return ""
    if above.st_mode & stat.S_IWOTH:
        return "which every user may write to"
    if above.st_mode & stat.S_IWGRP and not _is_own_group(above.st_gid):
        return "which its group may write to"
    return ""


def _is_own_group(number: int) -> bool:
    """Returns True for a group whose only member is this user. Many systems make such a group for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _make(place: Path, name: str) -> PrivateDirectory:
    """Makes and locks a new directory in `place`, and removes old directories whose lock no process holds."""
    only = lock(place)  # so no launcher removes a directory that another launcher has made but not locked yet
    try:
        for left in place.glob(f"{PREFIX}*"):
            _remove_left(left)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        return PrivateDirectory(path, name, lock(path))
    finally:
        os.close(only)


def _remove_left(directory: Path) -> None:
    """Removes a directory that is still there because its server and the process that cleans up were both killed."""
    try:
        descriptor = lock(directory, fcntl.LOCK_NB)
    except OSError:
        return
    shutil.rmtree(directory, ignore_errors=True)
    os.close(descriptor)


def _fill(directory: PrivateDirectory, plan: Plan, environ: Mapping[str, str]) -> None:
    script = directory.path / "shim"
    script.write_bytes(shim(plan, environ))
    script.chmod(0o700)
    if not os.access(script, os.X_OK):
        raise PermissionError(errno.EACCES, "is mounted noexec, so that no program can be executed there")
    directory.executable.parent.mkdir()
    if plan.start == "symlink":
        # In macOS releases the libraries lie beside the executable, or in ../lib.
        _link_all(plan.ollama.parent, directory.executable.parent, plan.ollama.name)
        _link_all(plan.ollama.parents[1] / "lib", directory.path / "lib")
        directory.executable.symlink_to(plan.ollama)
    else:
        link_or_copy(plan.ollama, directory.executable)
        _add_libraries(directory, plan)


def _add_libraries(directory: PrivateDirectory, plan: Plan) -> None:
    """Fills `lib/ollama`, where hosts on Linux look first, with links to the host's libraries and an MLX library."""
    own = directory.path / "lib" / "ollama"
    own.mkdir(parents=True)
    if plan.libraries is not None:
        _link_all(plan.libraries, own)
    if not (own / LIBRARY).exists() and not write_library(plan.ollama, own) and plan.serves:
        print(
            "mlx-runner: there is no working C compiler (cc). Without an MLX library that it can load, as without an "
            "NVIDIA GPU, this release of Ollama refuses MLX models; with a compiler it would get an empty library",
            file=sys.stderr,
        )
    if not any(own.iterdir()):
        shutil.rmtree(own.parent)


def _link_all(source: Path, target: Path, *others: str) -> None:
    """Makes a symbolic link in `target` for everything in `source` except the names in `others`."""
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            if path.name not in others:
                (target / path.name).symlink_to(path)
