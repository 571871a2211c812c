"""A rank notices that another one is gone or silent, and takes no rank for gone that is slow to start."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NoReturn

import pytest

from runner.errors import RunnerError
from runner.ranks import link
from runner.ranks.frames import FrameKind, Loaded, RankFailed, decode_body
from runner.ranks.link import Link, Peer, Watch
from tests.lib.patience import stretched

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # SystemExit
NAME = "rank 1"


class Watched:
    """A watch over one peer; the test has its end of the connection."""

    def __init__(self) -> None:
        ours, self.far = socket.socketpair()
        self.peer = Peer(NAME, Link(ours))
        self.taken: SimpleQueue[tuple[FrameKind, bytes]] = SimpleQueue()
        self.lost: SimpleQueue[str] = SimpleQueue()

    def start(self) -> None:
        Watch([self.peer], self._take, self._gone, lambda: 12).start()

    def _take(self, _: Peer, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.LOADED:
            decode_body(body, Loaded)
        self.taken.put((kind, body))

    def _gone(self, peer: Peer, why: RunnerError | None) -> NoReturn:
        assert peer is self.peer
        self.lost.put(str(why or ""))
        raise SystemExit  # of this thread, in place of the process

    def why(self) -> str:
        return self.lost.get(timeout=stretched(20))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(link, "BEAT_S", 0.05)
    monkeypatch.setattr(link, "SILENCE_S", 3.0)
    watched = Watched()
    yield watched
    watched.far.close()  # ends the watch
    for thread in threading.enumerate():
        if thread.name == "ranks":
            thread.join(stretched(5))
    watched.peer.link.close()


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda far: far.close(), ""),
        (lambda far: far.sendall(b"\xff" * 5), "the other side does not speak the protocol of ranks"),
        (lambda far: far.sendall(b"\x01\0\0\0\x03\xc1"), "the other side does not speak the protocol of ranks: "),
        (lambda far: Link(far).send(FrameKind.FAILED, RankFailed("no room")), "no room"),
        (lambda far: far.sendall(b"\x10\0\0\0\x04half"), "it sent nothing for 3 s"),
        (lambda far: None, "it sent nothing for 3 s"),
    ],
    ids=["closed", "no frame", "no message", "failed", "half a frame", "silent"],
)
def test_the_end_of_a_peer_is_noticed(watched: Watched, act: Callable[[socket.socket], None], why: str) -> None:
    watched.start()
    act(watched.far)
    found = watched.why()
    assert found.startswith(why) if why else found == ""


def test_a_peer_that_was_slow_to_start_is_not_taken_for_gone(watched: Watched) -> None:
    watched.peer.heard_s -= 100
    watched.start()
    link = Link(watched.far)
    for _ in range(8):
        time.sleep(0.05)
        link.beat(7)
    link.send(FrameKind.LOADED, Loaded(1, 2))
    assert watched.taken.get(timeout=stretched(20))[0] is FrameKind.LOADED
    assert watched.lost.empty()
    assert watched.peer.memory_bytes == 7


def unread(end: socket.socket) -> int:
    """Waits for bytes that have come to this end; returns how many nobody has read."""
    return len(end.recv(1 << 16, socket.MSG_PEEK))


def test_beats_are_sent_while_nobody_reads_and_frames_stay_whole(watched: Watched) -> None:
    watched.start()
    beats = Link(watched.far)
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.05):
            beats.beat(1)

    threading.Thread(target=live, daemon=True).start()
    one = unread(watched.far)
    while unread(watched.far) < 3 * one:
        time.sleep(0.01)
    watched.peer.link.send(FrameKind.LOADED, Loaded(3, 4))
    kinds: list[FrameKind] = []
    while not kinds or kinds[-1] is FrameKind.BEAT:
        kinds.append(beats.receive(stretched(5))[0])
    stop.set()
    assert len(kinds) > 2
    assert kinds[-1] is FrameKind.LOADED
