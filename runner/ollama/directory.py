"""The private directory in which a host finds itself, and later the shim; and what lies in it.

    serve-RANDOM/bin/NAME    Ollama's executable at first, the shim as soon as Ollama runs
    serve-RANDOM/bin/...     on macOS, symbolic links to everything beside the executable
    serve-RANDOM/lib/...     symbolic links to its libraries

Ollama and all that it starts inherit a lock on the directory. Once no process holds the lock, the directory is removed:
by the process that waits for that, or by the next start. `systemd-tmpfiles` does not touch locked directories either.
"""

import errno
import fcntl
import grp
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from runner.ollama.plan import LaunchError, Plan, own_command
from runner.process.parent import CHANGED, FORCED, OLLAMA

NAME = "ollama-mlx-runner"
PREFIX = "serve-"


class PrivateDirectory(NamedTuple):
    """A directory and the descriptor that holds its lock; `name` is the executable's."""

    path: Path
    name: str
    lock: int

    @property
    def executable(self) -> Path:
        """The path that a host takes for its own executable."""
        return self.path / "bin" / self.name

    def replace(self) -> None:
        """Puts the shim in the place of `executable`."""
        (self.path / "shim").rename(self.executable)


def user_cache(environ: Mapping[str, str]) -> Path:
    """Returns this project's folder in the user's cache, which may not exist."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):
        # Without a home directory the `~` stays, and the place is refused.
        cache = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")  # noqa: PTH111
    return Path(cache, NAME)


def places(environ: Mapping[str, str]) -> list[Path]:
    """Returns the places for private directories, best first: /tmp may be cleaned up while a server runs."""
    temporary = [Path(place, f"{NAME}-{os.geteuid()}") for place in (tempfile.gettempdir(), "/var/tmp")]
    return [user_cache(environ), *temporary]


def make_directory(plan: Plan, environ: Mapping[str, str]) -> PrivateDirectory:
    """Makes, fills and locks a directory in the first of `places` that allows it. Raises LaunchError."""
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
    """Returns a descriptor that holds the directory's lock. BlockingIOError with LOCK_NB if another one holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link, which costs nothing, or a copy where kernel or file system refuse a link."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o700)


def _own(place: Path) -> Path:
    """Makes `place` if it does not exist, and returns its path without symbolic links. PermissionError if other users
    could write there, or exchange it."""
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
    """Returns how users other than this one and root can exchange the entries of a directory; "" if they cannot.

    In a sticky directory such as /tmp only its owner can.
    """
    # The owner of `/` is root, also in a container that has another number for it.
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
    """True for a group whose only member is this user: many systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _make(place: Path, name: str) -> PrivateDirectory:
    """Makes and locks a new directory, and removes those whose lock no process holds."""
    only = lock(place)  # so that a directory which another launcher has made but not locked yet is not removed
    try:
        for left in place.glob(f"{PREFIX}*"):
            _remove_left(left)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        return PrivateDirectory(path, name, lock(path))
    finally:
        os.close(only)


def _remove_left(directory: Path) -> None:
    """Removes a directory whose server was killed together with the process that waited for its end."""
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
    """Fills `../lib/ollama`, where all hosts on Linux look first, with their own libraries and an MLX library."""
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


# --- The shim: the script that a host finds in place of its own executable (docs/internals/wire.md, 1.2, 1.3, 11).

_SHIM = """\
#!/bin/sh
# Ollama finds this in place of its own executable. MLX models run on this runner, everything else runs on Ollama.

# The runner may hand over to Ollama's own (runner/ollama/hand_over.py), which gets the environment of this script.
mlx_runner() {{
{tell}
{restore}
  exec {runner} "$@"
}}

# True for `--mlx-engine`, and for no engine and a model with a tag. GGUF runners get another engine, or a file.
is_mlx() (
  engine= model= expected=
  for word do
    case $expected in
      model) model=$word expected= ; continue ;;
      port) expected= ; continue ;;
    esac
    case $word in
      --model=* | -model=*) model=${{word#*=}} ;;
      --model | -model) expected=model ;;
      --port | -port) expected=port ;;
      --mlx-engine) engine=mlx ;;
      --*-engine) exit 1 ;;
    esac
  done
  [ "$engine" = mlx ] && exit 0
  case $model in /*) exit 1 ;; esac
  case ${{model##*/}} in *:*) exit 0 ;; esac
  exit 1
)

case ${{1-}} in
  runner) if is_mlx "$@"; then mlx_runner "$@"; fi ;;
  serve | start) exec {launcher} "$@" ;; # clients of some releases start a server if there is none
esac
exec {ollama} "$@"
"""


def shim(plan: Plan, environ: Mapping[str, str]) -> bytes:
    """Returns the script. `environ` holds the variables that runners get back."""
    told = {"": str(plan.ollama), "_LIBRARIES": str(plan.libraries or ""), "_MEDIA": " ".join(plan.media)}
    tell = [f"  export {OLLAMA}{name}={shlex.quote(value)}" for name, value in told.items()]
    tell += [
        f'  unset {OLLAMA}_{name}; [ -z "${{{name}+set}}" ] || export {OLLAMA}_{name}="${name}"' for name in CHANGED
    ]
    restore = [
        f"  export {name}={shlex.quote(environ[name])}" if name in environ else f"  unset {name}" for name in FORCED
    ]
    runner = shlex.join(plan.runner)
    launcher = [*own_command(), "ollama", "serve", "--start", plan.start, "--runner", runner, str(plan.ollama)]
    text = _SHIM.format(
        tell="\n".join(tell),
        restore="\n".join(restore),
        runner=runner,
        launcher=shlex.join(launcher),
        ollama=shlex.quote(str(plan.ollama)),
    )
    return os.fsencode(text)


# --- An empty MLX library, for hosts on machines where they cannot load a real one.
#
# Hosts since v0.34.1 load an MLX model, and since v0.32.10 pull one, only if they themselves could load `libmlxc`,
# though only their runners compute with it. Without an NVIDIA GPU they cannot. This library has every function that a
# host looks up, and computes nothing: reading tensors, which comes before all computing, fails with a clear text, and
# every other function does nothing. Hosts look for it last, and so prefer a library of their own that can be loaded.

LIBRARY = "libmlxc.so"
_CHECKED = b"MLX runtime is not available"
"""This text stands in the executables of all hosts that check."""
_FUNCTION = re.compile(rb"mlx_[a-z0-9_]*[a-z0-9](?=\0)")
_COMPILE_S = 60

_SOURCE = """\
typedef void report(const char *, void *);
static report *reported;
static void *data;
void mlx_set_error_handler(report *handler, void *its, void (*end)(void *)) { reported = handler; data = its; }
static long nothing(void) { return 0; }
static long failure(void) {
  if (reported) reported("Ollama has no working MLX library; mlx-runner ollama serve gave it an empty one", data);
  return 1;
}
"""


def library_functions(executable: Path) -> list[str]:
    """Returns the names that a host looks up in its MLX library; none if it does not need the library."""
    content = executable.read_bytes()
    if _CHECKED not in content:
        return []
    starts = ((found.start(), found.end()) for found in _FUNCTION.finditer(content))
    return sorted({content[start - content.startswith(b"_", start - 1) : end].decode() for start, end in starts})


def write_library(executable: Path, directory: Path) -> bool:
    """Writes the library for a host into `directory`, if it needs one. Returns False without a working compiler."""
    names = library_functions(executable)
    if not names:
        return True
    compiler = shutil.which("cc")
    if compiler is None:
        return False
    source = _SOURCE + "".join(
        f'long {name}(void) __attribute__((alias("{"failure" if name.startswith("mlx_load") else "nothing"}")));\n'
        for name in names
        if name != "mlx_set_error_handler"
    )
    command = [compiler, "-x", "c", "-w", "-shared", "-fPIC", "-o", str(directory / LIBRARY), "-"]
    try:
        subprocess.run(command, input=source.encode(), capture_output=True, check=True, timeout=_COMPILE_S)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        (directory / LIBRARY).unlink(missing_ok=True)
        return False
    return True
