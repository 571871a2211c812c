"""The process that ends Ollama's own runner soon after their host: `python watcher.py HOST RUNNER`, two process ids.

That runner does not watch its host, which a SIGKILL ends without a word. This process holds nothing of theirs, waits
without polling until one of them has ended, and ends then. It writes a line once it watches. Runs by itself, with what
Python has built in.
"""

import os
import select
import signal
import sys
from collections.abc import Callable


def end_of_any(*pids: int) -> Callable[[], object]:
    """Returns a function that waits until one of these processes has ended. Raises OSError if one already has, or if
    this system cannot watch processes."""
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
    """Watches both processes. The runner is this one's parent."""
    wait = end_of_any(host, runner)
    print(flush=True)
    wait()
    if os.getppid() == runner:
        os.kill(runner, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
