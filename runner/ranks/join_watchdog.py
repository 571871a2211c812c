"""A watchdog that ends a process which waits in vain for the other ranks.

`mx.distributed.init` waits without limit and holds the interpreter's lock, so no thread of the waiting process could
notice anything. This file is also the watchdog's own program, which imports no module of the runner.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_ENDED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


@contextmanager
def join_watchdog(seconds: float, peers: Mapping[int, str], *, reports: bool) -> Iterator[None]:
    """Kills this process if the block takes longer than `seconds`, or if a peer closes its connection meanwhile.
    `peers` are the names of other sides, by the descriptors of connections. If the watchdog `reports`, it writes the
    reason as the line that a host reads."""
    words = [str(os.getpid()), str(seconds), str(int(reports))]
    words += [word for descriptor, name in peers.items() for word in (str(descriptor), name)]
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-I", "-S", __file__, *words], stdin=subprocess.PIPE, pass_fds=[*peers]
    ):  # the end of the block closes the watchdog's stdin, which ends the watchdog
        yield


def _await_fault(pid: int, seconds: float, peers: Mapping[int, str]) -> str:
    """Returns the reason why process `pid` must end. Empty if it need not end."""
    closed = select.poll()
    closed.register(sys.stdin.fileno(), select.POLLIN)
    for descriptor in peers:
        closed.register(descriptor, _ENDED)
    found = [descriptor for descriptor, _ in closed.poll(seconds * 1000)]
    if sys.stdin.fileno() in found or os.getppid() != pid:
        return ""
    if not found:
        return f"the ranks could not be joined in {seconds:.0f} s"
    return f"{peers[found[0]]} ended while the ranks were joined"


def _main() -> None:
    pid, seconds, reports, *words = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; the watched process decides
    why = _await_fault(int(pid), float(seconds), dict(zip(map(int, words[::2]), words[1::2], strict=True)))
    if why:
        if reports == "1":
            os.write(2, f"Error: {why}\n".encode())
        os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    _main()
