"""Ends Ollama's own runner soon after the end of its host: `python watcher.py HOST RUNNER`, with two process ids.

Ollama's runner does not notice when a SIGKILL ends its host. This program waits, without polling, until the host or the
runner has ended, and then ends itself. It writes a line when it begins to wait. It imports only Python's own modules.
"""

import os
import select
import signal
import sys
from collections.abc import Callable


def end_of_any(*pids: int) -> Callable[[], object]:
    """Returns a function that waits until one of the processes `pids` has ended. Raises OSError if one has already
    ended, or if this system cannot watch processes."""
    if sys.platform == "darwin":
        queue = select.kqueue()
        ends = [select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT) for pid in pids]
        queue.control(ends, 0)
        return lambda: queue.control(None, 1)
    poll = select.poll()
    for pid in pids:
        poll.register(os.pidfd_open(pid), select.POLLIN)
    return poll.poll


def main(host: int, runner: int) -> None:
    """Waits until one of them has ended, then kills the runner if it is still this process's parent."""
    wait = end_of_any(host, runner)
    print(flush=True)
    wait()
    if os.getppid() == runner:
        os.kill(runner, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
