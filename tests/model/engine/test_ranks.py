"""What a leader computes, a follower computes from the leader's tape alone, and never waits for what comes too late.

Leader and follower are engines of one process, one after the other, with a link between them that keeps what is sent.
Each has the whole model. The places where ranks would wait for each other, forwards and agreements, are numbered: a
follower that reads a frame which the leader writes behind such a place would wait for ever.
"""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.engine.generation import Forward
from runner.ranks import group
from runner.ranks import rank_world as ranked
from runner.ranks.follower import Follower
from runner.ranks.frames import FrameKind
from runner.ranks.link import Link, LinkClosedError
from runner.ranks.rank_world import follower_tape, leader_tape
from runner.ranks.start import Leader
from runner.tape.recording import Recording
from runner.tape.replay import Replay, Replayed
from runner.tape.tape import EntryKind, Tape, TapeEnd, decode_entries
from scripts.tools.models.tiny import KINDS, VOCAB
from tests.lib.taped_engine import MIXES, Seen, Story, events_in
from tests.lib.tiny_engine import plain_outbox


class Frames(SimpleQueue[bytes]):
    """The frames of a tape that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def get(self, block: bool = True, timeout: float | None = None) -> bytes:
        try:
            body = super().get(block=False)
        except Empty:
            raise TapeEnd from None
        self.read += 1
        return body


class Pair:
    """A leader and a follower."""

    def __init__(self, story: Story) -> None:
        self._story = story
        ours, theirs = socket.socketpair()
        self.link, self._far = Link(ours), Link(theirs)
        self.frames = Frames()
        self.bodies: list[bytes] = []
        self.written: list[int] = []
        """The frames that the leader had written at each place where ranks wait for each other."""
        self.forwards = 0

    def lead(self) -> Seen:
        """Runs the story on the leader."""
        leader = Leader.__new__(Leader)
        leader.group = mx.distributed.init()
        leader.tape = leader_tape([self.link])
        reader = threading.Thread(target=self._keep, daemon=True)
        reader.start()
        self._story.ranks = leader
        with self._waiting(lambda: self.written.append(self.link.writes)):
            seen = self._story.run(Recording(leader.tape, plain_outbox()))
        self.link.close()
        reader.join()
        for body in self.bodies:
            self.frames.put(body)
        return seen

    def follow(self) -> tuple[Replayed, Seen]:
        """Runs it again on the follower."""
        replay = Replay(follower_tape(self.frames), VOCAB)
        self._story.ranks = follower = Follower(self._far)
        follower.group = mx.distributed.init()
        read: list[int] = []
        with self._waiting(lambda: read.append(self.frames.read)):
            done, seen = self._story.run_again(replay)
        assert len(read) == len(self.written)
        late = [place for place, (here, there) in enumerate(zip(read, self.written, strict=True)) if here > there]
        assert not late, "the leader would wait for the follower, and the follower for the leader"
        return done, seen

    def _keep(self) -> None:
        try:
            while True:
                kind, body = self._far.receive()
                assert kind is FrameKind.TAPE
                self.bodies.append(body)
        except LinkClosedError:
            pass

    @contextmanager
    def _waiting(self, note: Callable[[], None]) -> Iterator[None]:
        """Calls `note` wherever ranks wait for each other."""
        agreement, forward = group.agreement, ranked.checked_forward

        def agreed(token: mx.array, ranks: mx.distributed.Group) -> mx.array:
            note()
            return agreement(token, ranks)

        def counted(run: Forward, tape: Tape) -> Forward:
            def computed(tokens: mx.array, layers: list[object]) -> mx.array:
                note()
                self.forwards += 1
                return run(tokens, layers)

            return forward(computed, tape)

        with patch.object(group, "agreement", agreed), patch.object(ranked, "checked_forward", counted):
            yield


def check(story: Story) -> Pair:
    pair = Pair(story)
    seen = pair.lead()
    done, again = pair.follow()
    assert done.difference == ""
    assert again == seen
    assert done.requests == len(seen)
    return pair


@pytest.mark.parametrize("name", KINDS)
def test_a_follower_does_what_its_leader_does(name: str) -> None:
    check(Story(name, 0))


def test_the_mixes_have_all_that_a_follower_must_do() -> None:
    found: Counter[str] = Counter()
    for seed in MIXES:
        story = Story("llama", seed)
        for body in check(story).bodies:
            found += events_in(decode_entries(body))
        found["joined"] += story.joined > 1
    wanted = "done length cancelled refused joined matched evicted forced drafted accepted late"
    assert not [each for each in wanted.split() if not found[each]], found


def test_a_forward_costs_one_write_and_a_slice_few_bytes() -> None:
    pair = check(Story("llama", 3))
    entries = [entry for body in pair.bodies for entry in decode_entries(body)]
    slices = sum(kind is EntryKind.TURN for kind, _ in entries)
    prompts = sum(len(value) for _, value in entries if isinstance(value, bytes))
    idle = pair.link.writes - len(pair.written)
    assert pair.forwards // 2 > 20
    assert pair.link.writes <= len(pair.written) + pair._story.idle_slices + 1, idle
    assert pair.link.nbytes - prompts <= 200 * slices
