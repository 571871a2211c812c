"""`mlx-runner` and `python -m runner`."""

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
    # A signal ends the process at once and quietly, whatever it is doing; only the disk cache takes a moment (app.py).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _open_missing_streams()
    gc.disable()  # until start-up is done: all imported objects stay, and each collection would visit them again
    try:
        from runner.process import parent

        parent.restart_in_own_environment(os.environ, [sys.executable, *sys.orig_argv[1:]])
        from runner.app import run_process
    except (ImportError, OSError, MemoryError) as error:
        _die_of_installation(error)
    run_process(sys.argv[1:])


def _launch_ollama() -> "NoReturn":
    """Becomes Ollama, which gets signals, streams and environment as they are, not as a server needs them."""
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
    if isinstance(error, MemoryError):  # by itself: little of Python can be imported then
        advice = b"raise the limit on its address space (`ulimit -v`; for a service it is LimitAS)"
        os.write(2, b"Error: the runner cannot start in so little memory: " + advice + b"\n")
    else:
        os.write(2, f"Error: the installation is broken: {error}\n".encode())
    os._exit(1)


def _open_missing_streams() -> None:
    """Opens standard streams that are closed: a socket with the number of one would get its output."""
    for stream in (0, 1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    main()
