"""What a follower takes from a leader."""

import socket
import sys
from pathlib import Path

import msgspec
import pytest

from runner.errors import RankError, RunnerError
from runner.logs import cause_of, lacks_memory
from runner.ranks.follower import follow_leader
from runner.ranks.frames import FrameKind, Here, Join, RankFailed
from runner.ranks.link import Link
from tests.lib.taped_engine import HEADER


def test_no_code_is_loaded_that_another_machine_names() -> None:
    header = msgspec.structs.replace(HEADER, settings={**HEADER.settings, "blas": "/lib/x.so"})
    join = Join(1, 2, 1, "ring", header)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        leader = socket.create_connection(listener.getsockname())
        follower, _ = listener.accept()
    with leader, follower:
        Link(leader).send(FrameKind.JOIN, join)
        with pytest.raises(RankError, match=r"^--blas /lib/x\.so names a library of the leader's machine"):
            follow_leader(Link(follower), Path("/nowhere"), 20)


@pytest.mark.parametrize("no_memory", [False, True])
def test_a_leader_reads_why_a_follower_failed(no_memory: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Link(theirs).send(FrameKind.FAILED, RankFailed("weights: the leader has 1, this rank 2", no_memory))
        with pytest.raises(RunnerError, match=r"^weights: the leader has 1, this rank 2$") as caught:
            Link(ours).expect(FrameKind.HERE, Here, 10)
    assert lacks_memory(cause_of(caught.value)) is no_memory


def test_a_process_of_the_leaders_own_is_reached_on_loopback() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert (Link(ours).is_local, Link(ours).host) == (True, "127.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="has one address on loopback")
def test_each_side_takes_tensors_where_the_other_reaches_it() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        leader = socket.create_connection(listener.getsockname(), source_address=("127.0.0.3", 0))
        follower, _ = listener.accept()
    with leader, follower:
        assert (Link(leader).is_local, Link(leader).host, Link(follower).host) == (False, "127.0.0.3", "127.0.0.2")
