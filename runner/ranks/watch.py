"""Watches the other side of links: a thread that never computes, so it is never late."""

import threading
from collections.abc import Callable, Sequence
from select import POLLIN, poll
from time import monotonic
from typing import NoReturn

from runner.errors import RunnerError
from runner.ranks.link import BEAT_S, SILENCE_S, Beat, Failed, Kind, Link, LinkClosedError, decoded


class Peer:
    """The other side of a link."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        """Its rank and its address, in words."""
        self.link = link
        self.memory_bytes = 0
        """The memory that MLX has in use there, as of its last beat."""
        self.heard_s = monotonic()


class Watch:
    """Tells what peers send, and when one of them is gone; sends them a beat every second."""

    def __init__(
        self,
        peers: Sequence[Peer],
        take: Callable[[Peer, Kind, bytes], None],
        gone: Callable[[Peer, str], NoReturn],
        memory: Callable[[], int],
    ) -> None:
        """Calls, on a thread of its own, `take` with frames that are no beats, and `gone` once, with why a peer is lost
        (empty if its connection was closed). `memory` tells the bytes for the beats."""
        self._peers = peers
        self._take, self._gone, self._memory = take, gone, memory

    def start(self) -> None:
        """Starts the thread. From now on peers must not be silent."""
        for peer in self._peers:
            peer.heard_s = monotonic()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def _run(self) -> None:
        readable = poll()
        peers = {peer.link.fileno(): peer for peer in self._peers}
        for descriptor in peers:
            readable.register(descriptor, POLLIN)
        beaten_s, looked_s = 0.0, monotonic()
        while True:
            for descriptor, _ in readable.poll(BEAT_S * 1000):
                self._receive(peers[descriptor])
            now_s = monotonic()
            slept_s, looked_s = max(0.0, now_s - looked_s - 2 * BEAT_S), now_s
            for peer in self._peers:  # if this process was stopped, its peers may have been stopped as well
                peer.heard_s += slept_s
            if now_s - beaten_s >= BEAT_S:
                beaten_s = now_s
                for peer in self._peers:
                    peer.link.beat(self._memory())
            silent = min(self._peers, key=lambda peer: peer.heard_s)
            if now_s - silent.heard_s > SILENCE_S:
                self._gone(silent, f"nothing was heard of it for {SILENCE_S:.0f} s")

    def _receive(self, peer: Peer) -> None:
        try:
            kind, body = peer.link.receive(SILENCE_S)
            peer.heard_s = monotonic()
            if kind is Kind.BEAT:
                peer.memory_bytes = decoded(body, Beat).memory_bytes
            elif kind is Kind.FAILED:
                self._gone(peer, decoded(body, Failed).text)
            else:
                self._take(peer, kind, body)
        except TimeoutError:
            self._gone(peer, f"nothing was heard of it for {SILENCE_S:.0f} s")
        except LinkClosedError:
            self._gone(peer, "")
        except RunnerError as error:
            self._gone(peer, str(error))
