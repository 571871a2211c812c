"""`mlx-runner` and `python -m runner`."""

import signal
import sys


def main() -> None:
    """Run the process; it ends by a signal, by an error line, or not at all."""
    # A signal ends the process at once and quietly, whatever it is doing: nothing here waits for a graceful end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from runner.start import start

    start(sys.argv[1:])


if __name__ == "__main__":
    main()
