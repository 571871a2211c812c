"""Starts an installed Ollama so that its MLX models run on this runner. The installation is not changed.

To start a runner, a host executes its own executable. It looks up the path each time (docs/internals/wire.md, 1.2): on
Linux by `/proc/self/exe`, on macOS it is the path by which the host was started. So the launcher starts the host from a
private directory, by a path that leads to the host during the start, and to a shim after it:

* Linux (`descriptor`): Ollama's executable is linked or copied to that path, and opened. Then the shim is renamed
  to the path, and the open file is executed. `/proc/self/exe` names the shim from the host's first instruction on.
* macOS (`symlink`): a symbolic link to the executable is executed. Then the shim is renamed to the path of the
  link. The host finds its libraries both before and after the renaming.

The launcher's process becomes Ollama: Ollama has its process id and output, gets its signals and sets its exit status.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from runner.logs import printable
from runner.ollama.directory import PrivateDirectory, lock, make_directory
from runner.ollama.plan import START, LaunchError, Plan, find_media, find_ollama, find_runner, refuse_taken_address
from runner.settings import LaunchSettings


def launch(settings: LaunchSettings, environ: Mapping[str, str]) -> NoReturn:
    """Becomes Ollama, with exactly this environment. If that fails, prints the reason and exits with status 1."""
    try:
        plan = make_plan(settings)
        if plan.serves:
            refuse_taken_address(environ.get("OLLAMA_HOST", ""))
        directory = make_directory(plan, environ)
        if plan.serves:
            print(
                f"mlx-runner: starting {shlex.join([str(plan.ollama), *plan.words])}\n"
                f"mlx-runner: its MLX models run on {shlex.join(plan.runner)}\n"
                f"mlx-runner: {directory.path} holds links to it, and is removed when Ollama ends",
                file=sys.stderr,
                flush=True,
            )
        execute(plan, directory, environ)
    except LaunchError as error:
        sys.exit("\n".join(map(printable, f"Error: {error}".split("\n"))))


def make_plan(settings: LaunchSettings) -> Plan:
    """Finds the programs that the settings name. Raises LaunchError if one is missing or unsuitable."""
    ollama, runner = find_ollama(settings.ollama), find_runner(settings.runner)
    plan = Plan(ollama, settings.words, runner, settings.start or START)
    return plan._replace(media=find_media(ollama)) if plan.serves else plan


def execute(plan: Plan, directory: PrivateDirectory, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by Ollama. Raises LaunchError if that is impossible."""
    try:
        started = watch(directory, replace=plan.start == "symlink")
    except OSError as error:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise LaunchError(f"cannot start a process: {error.strerror}") from error
    try:
        path = _replaced(directory) if plan.start == "descriptor" else directory.executable
        os.set_inheritable(directory.lock, True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would Ollama
            signal.signal(number, signal.SIG_DFL)
        os.execve(path, [str(plan.ollama), *plan.words], dict(environ))
    except OSError as error:
        raise LaunchError(f"cannot execute {plan.ollama}: {error.strerror}") from error
    finally:
        os.close(started)


def _replaced(directory: PrivateDirectory) -> Path:
    """Puts the shim in place of the executable. Returns a new path to the executable, with the same last part."""
    descriptor = os.open(directory.executable, os.O_RDONLY)
    directory.replace()
    opened = Path(f"/proc/self/fd/{descriptor}")
    # The host reads its own path like this. Network file systems rename an open file instead of removing it.
    if str(opened.readlink()) != f"{directory.executable} (deleted)":
        raise LaunchError(f"{directory.path} cannot be used. Set XDG_CACHE_HOME to a directory on a local file system.")
    path = directory.path / "run" / directory.name
    path.parent.mkdir()
    path.symlink_to(opened)
    return path


def watch(directory: PrivateDirectory, *, replace: bool) -> int:
    """Starts a process that removes the directory when no process holds the directory's lock any more.

    The new process is detached from this one. It first waits until an exec of this process closes the returned
    descriptor. With `replace`, it then replaces the executable by the shim.
    """
    waiting, started = (_beyond_streams(descriptor) for descriptor in os.pipe())
    if child := os.fork():
        os.waitpid(child, 0)
        os.close(waiting)
        return started
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # systemd signals all processes of a service
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            _detach(waiting)
            os.read(waiting, 1)
            if replace:
                directory.replace()
            lock(directory.path)
            shutil.rmtree(directory.path, ignore_errors=True)
    finally:
        os._exit(0)


def _beyond_streams(descriptor: int) -> int:
    """Moves a descriptor to a number above 2: it may have the number of a standard stream that the caller closed."""
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return other


def _detach(kept: int) -> None:
    """Closes all inherited descriptors except `kept`. Connects the standard streams to the null device."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - the names are numbers
        if int(name) not in (0, 1, 2, kept):
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.close(int(name))
