"""Start an installed Ollama whose MLX models run on this runner. The installation is not touched.

A host starts its runners as its own executable, which it looks up whenever it needs one (docs/internals/wire.md, 1.2):
on Linux where `/proc/self/exe` points to, on macOS where the path by which it was started leads to. So it is started
from a private directory, under a path that leads to the host while it starts and to a shim from then on:

* Linux (`descriptor`): Ollama's executable, linked or copied to that path, is opened; the shim is renamed over it; what
  was opened is executed. `/proc/self/exe` names the shim from the host's first instruction on.
* macOS (`symlink`): a symbolic link to the executable is executed, and once that has happened the shim is renamed over
  it. Whether the host looks for its libraries before or after makes no difference: they are found from both places.

The process that was this launcher becomes Ollama: its process id, output, exit status and signals are Ollama's own.
"""

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from runner.ollama.directory import PrivateDirectory, lock, make_directory
from runner.ollama.plan import (
    START,
    LaunchError,
    Plan,
    find_media,
    find_ollama,
    find_runner,
    refuse_taken_address,
)

_EPILOG = """\
Ollama and its runners get your environment: OLLAMA_HOST, OLLAMA_MODELS and so on work as ever, and the runner's own
settings are variables too (mlx-runner --help lists them): MLX_RUNNER_KV_BITS=8 scripts/ollama-serve

Only MLX models (model_format safetensors) run on this runner. GGUF models and everything else stay Ollama's own, and
Ollama's own runner takes over what this one cannot serve: models that it refuses to load, and pictures and sound.
MLX_RUNNER_HAND_OVER=refused keeps the latter here, as text; MLX_RUNNER_HAND_OVER=off keeps all."""


def parse(argv: Sequence[str]) -> Plan:
    """The command line. Raises LaunchError; exits for --help and unknown options."""
    parser = argparse.ArgumentParser(
        prog="scripts/ollama-serve",
        usage="%(prog)s [--runner COMMAND] [OLLAMA [ARGUMENT ...]]",
        description=__doc__.split("\n")[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ollama", nargs="?", metavar="OLLAMA", help="its executable (default: ollama, from PATH)")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="for Ollama (default: serve)")
    parser.add_argument("--runner", metavar="COMMAND", help="another runner, as one word (default: this checkout's)")
    parser.add_argument("--start", choices=("descriptor", "symlink"), default=START, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    plan = Plan(find_ollama(options.ollama), options.words or ["serve"], find_runner(options.runner), options.start)
    return plan._replace(media=find_media(plan.ollama)) if plan.serves else plan


def execute(plan: Plan, directory: PrivateDirectory, environ: Mapping[str, str]) -> NoReturn:
    """Become Ollama. Raises LaunchError."""
    try:
        started = watch(directory, replace=plan.start == "symlink")
    except OSError as error:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise LaunchError(f"cannot start a process: {error.strerror}") from error
    try:
        path = _replaced(directory) if plan.start == "descriptor" else directory.executable
        os.set_inheritable(directory.lock, True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
            signal.signal(number, signal.SIG_DFL)
        os.execve(path, [str(plan.ollama), *plan.words], dict(environ))
    except OSError as error:
        raise LaunchError(f"cannot execute {plan.ollama}: {error.strerror}") from error
    finally:
        os.close(started)


def _replaced(directory: PrivateDirectory) -> Path:
    """The shim in place, and a path to what was there. Its last part becomes the name of the process."""
    descriptor = os.open(directory.executable, os.O_RDONLY)
    directory.replace()
    opened = Path(f"/proc/self/fd/{descriptor}")
    # What the host will read of itself. Network file systems keep removed files that are open, under other names.
    if str(opened.readlink()) != f"{directory.executable} (deleted)":
        raise LaunchError(f"{directory.path} does not do. Set XDG_CACHE_HOME to a directory on a local file system.")
    path = directory.path / "run" / directory.name
    path.parent.mkdir()
    path.symlink_to(opened)
    return path


def watch(directory: PrivateDirectory, *, replace: bool) -> int:
    """Start a process that removes the directory when nobody holds its lock any more.

    It is nobody's child, and waits until the returned descriptor is closed, by an exec; with `replace` it then puts the
    shim into its place.
    """
    waiting, started = (_beyond_streams(descriptor) for descriptor in os.pipe())
    if child := os.fork():
        os.waitpid(child, 0)
        os.close(waiting)
        return started
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a service is ended by signalling all it has
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
    """The same with a number that is none of the standard streams', which the caller may have closed."""
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return other


def _detach(kept: int) -> None:
    """Let go of all that was inherited but one descriptor."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - the names are numbers
        if int(name) not in (0, 1, 2, kept):
            with contextlib.suppress(OSError):  # the one of this listing
                os.close(int(name))


def main(locale: str, *argv: str) -> None:
    """Become Ollama, or say why not and exit with status 1.

    `locale` is what LC_CTYPE was, "" for nothing: Python may have changed it, for itself and all that it starts.
    """
    environ = {name: value for name, value in os.environ.items() if name != "LC_CTYPE"}
    if locale:
        environ["LC_CTYPE"] = locale
    try:
        plan = parse(argv)
        if plan.serves:
            refuse_taken_address(environ.get("OLLAMA_HOST", ""))
        directory = make_directory(plan, environ)
        if plan.serves:
            print(
                f"ollama-serve: starting {shlex.join([str(plan.ollama), *plan.words])}\n"
                f"ollama-serve: its MLX models run on {shlex.join(plan.runner)}\n"
                f"ollama-serve: by way of {directory.path}, which is removed when Ollama has ended",
                file=sys.stderr,
                flush=True,
            )
        execute(plan, directory, environ)
    except LaunchError as error:
        sys.exit(f"ollama-serve: {error}")
