"""Starts an installed Ollama whose MLX models run on this runner. The installation is not changed.

A host starts its runners as its own executable, which it looks up whenever it needs one (docs/internals/wire.md, 1.2):
on Linux by `/proc/self/exe`, on macOS by the path by which it was started. So it is started from a private directory,
under a path that leads to the host while it starts and to a shim from then on:

* Linux (`descriptor`): Ollama's executable, linked or copied to that path, is opened; the shim is renamed over it; the
  open file is executed. `/proc/self/exe` names the shim from the host's first instruction on.
* macOS (`symlink`): a symbolic link to the executable is executed, and once that has happened the shim is renamed over
  it. The host may look for its libraries before or after: it finds them from both places.

The launcher's process becomes Ollama: its process id, output, exit status and signals are Ollama's own.
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
    """Becomes Ollama, with exactly this environment; or prints the reason why it cannot and exits with status 1."""
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
    """Finds the programs that the settings name. Raises LaunchError."""
    ollama, runner = find_ollama(settings.ollama), find_runner(settings.runner)
    plan = Plan(ollama, settings.words, runner, settings.start or START)
    return plan._replace(media=find_media(ollama)) if plan.serves else plan


def execute(plan: Plan, directory: PrivateDirectory, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by Ollama. Raises LaunchError."""
    try:
        started = watch(directory, replace=plan.start == "symlink")
    except OSError as error:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise LaunchError(f"cannot start a process: {error.strerror}") from error
    try:
        path = _replaced(directory) if plan.start == "descriptor" else directory.executable
        os.set_inheritable(directory.lock, True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an exec keeps that
            signal.signal(number, signal.SIG_DFL)
        os.execve(path, [str(plan.ollama), *plan.words], dict(environ))
    except OSError as error:
        raise LaunchError(f"cannot execute {plan.ollama}: {error.strerror}") from error
    finally:
        os.close(started)


def _replaced(directory: PrivateDirectory) -> Path:
    """Puts the shim into place. Returns a path to the former executable; its last part becomes the process's name."""
    descriptor = os.open(directory.executable, os.O_RDONLY)
    directory.replace()
    opened = Path(f"/proc/self/fd/{descriptor}")
    # The host reads this as its own path. Network file systems keep removed files that are open, under new names.
    if str(opened.readlink()) != f"{directory.executable} (deleted)":
        raise LaunchError(f"{directory.path} cannot be used. Set XDG_CACHE_HOME to a directory on a local file system.")
    path = directory.path / "run" / directory.name
    path.parent.mkdir()
    path.symlink_to(opened)
    return path


def watch(directory: PrivateDirectory, *, replace: bool) -> int:
    """Starts a process that removes the directory once no process holds its lock.

    The process is detached from this one, and waits until an exec closes the returned descriptor. With `replace` it
    then puts the shim into its place.
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
    """Moves a descriptor above the numbers of the standard streams, which the caller may have closed."""
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return other


def _detach(kept: int) -> None:
    """Closes all inherited descriptors but one."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - the names are numbers
        if int(name) not in (0, 1, 2, kept):
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.close(int(name))
