"""`mlx-runner` and `python -m runner`."""

import gc
import os
import signal
import sys


def main() -> None:
    """Run the process; it ends by a signal, by an error line, or not at all."""
    # A signal ends the process at once and quietly, whatever it is doing: nothing here waits for a graceful end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _open_missing_streams()
    gc.disable()  # until all is there: whatever is imported stays, and would be looked through again and again
    try:
        from runner.process import parent

        parent.restart_in_own_environment(os.environ, [sys.executable, *sys.orig_argv[1:]])
        from runner.app import start
    except (ImportError, OSError) as error:
        os.write(2, f"Error: the installation is broken: {error}\n".encode())
        os._exit(1)
    start(sys.argv[1:])


def _open_missing_streams() -> None:
    """Were one of them closed, the next socket would get its number, and the log lines."""
    for stream in (0, 1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    main()
