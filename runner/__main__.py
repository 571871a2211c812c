"""The entry point of `mlx-runner` and of `python -m runner`."""

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> None:
    """Runs the process until a signal or an error line ends it."""
    if sys.argv[1:2] == ["ollama"]:
        _launch_ollama()
    # SIGINT ends the process immediately and without a traceback; only the disk cache takes a moment (app.py).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _open_missing_streams()
    gc.disable()  # until the start is done: collections would visit all imported objects, which stay
    try:
        from runner.process import parent

        parent.restart_in_own_environment(os.environ, [sys.executable, *sys.orig_argv[1:]])
        sys.modules["ssl"] = None  # type: ignore[assignment]  # asyncio then does without it: nothing here uses TLS
        from runner.app import run_process

        del sys.modules["ssl"]
    except (ImportError, OSError, MemoryError) as error:
        _die_of_installation(error)
    run_process(sys.argv[1:])


def _launch_ollama() -> "NoReturn":
    """Replaces this process by Ollama, with unchanged signals, streams and environment, not those that a server
    needs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from runner import logs
        from runner.cli.parse import parse_ollama, unknown_variables
        from runner.errors import UsageError
        from runner.ollama.launcher import launch
        from runner.process import parent
    except ImportError as error:
        _die_of_installation(error)
    try:
        settings = parse_ollama(sys.argv[2:])
    except UsageError as error:
        logs.die(error, status=2)
    if warning := unknown_variables(os.environ):
        sys.stderr.write(f"mlx-runner: {logs.printable(warning)}\n")
    launch(settings, parent.given_environment(os.environ))


def _die_of_installation(error: Exception) -> "NoReturn":
    if isinstance(error, MemoryError):  # handled apart: with so little memory, few modules can be imported
        advice = b"raise the limit on its address space (`ulimit -v`; for a service it is LimitAS)"
        os.write(2, b"Error: the runner cannot start in so little memory: " + advice + b"\n")
    else:
        os.write(2, f"Error: the installation is broken: {error}\n".encode())
    os._exit(1)


def _open_missing_streams() -> None:
    """Opens standard streams that are closed: otherwise a socket could get a stream's number, and its output."""
    for stream in (0, 1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    main()
