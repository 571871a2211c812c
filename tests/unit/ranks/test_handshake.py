"""Who may lead is proved before anything else is read."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from runner.errors import RankError
from runner.ranks import handshake
from runner.ranks.handshake import ProvedLeader, StrangerError, prove_to_service
from tests.lib.patience import stretched

SECRET = b"0123456789abcdef"
HELLO = b"mlx-runner ranks 02\n"


@pytest.fixture(name="pair")
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ends of a connection: a leader's and a service's."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as ours, listener.accept()[0] as theirs:
            ours.settimeout(60)
            yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


@contextmanager
def beside(act: Callable[[], object]) -> Iterator[list[BaseException | None]]:
    """Runs `act` on another thread; the list has how it ended, after the block."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            act()
        except RankError as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    yield ended
    thread.join(60)
    assert ended


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := connection.recv(count - len(data))):
        data += part
    return data


@pytest.mark.parametrize("refusal", ["", "busy with another", "ü" * 300])
def test_both_know_the_secret(pair: Pair, refusal: str) -> None:
    ours, theirs = pair
    with beside(lambda: ProvedLeader(theirs, SECRET).answer(refusal)) as service:
        if refusal:
            with pytest.raises(RankError, match=refusal[:17]):
                prove_to_service(ours, SECRET)
        else:
            prove_to_service(ours, SECRET)
    assert service == [None]


def test_another_secret_is_told_on_both_sides(pair: Pair) -> None:
    ours, theirs = pair
    serve = beside(lambda: ProvedLeader(theirs, SECRET).answer())
    with serve as service, pytest.raises(RankError, match="another secret"):
        prove_to_service(ours, b"another secret!!")
    assert "another secret" in str(service[0])


def test_a_service_that_only_says_yes_is_found_out(pair: Pair) -> None:
    """One that accepts every leader does not know the secret."""
    ours, theirs = pair
    with beside(lambda: prove_to_service(ours, SECRET)) as leader:
        theirs.sendall(HELLO + bytes(32))
        exactly(theirs, len(HELLO) + 64)
        theirs.sendall(b"+" + bytes(32) + b"\0")
    assert "another secret" in str(leader[0])


def test_an_answer_that_somebody_changed_is_found_out(pair: Pair) -> None:
    ours, theirs = pair
    near, far = socket.socketpair()
    serve = beside(lambda: ProvedLeader(far, SECRET).answer("busy"))
    with near, far, serve, beside(lambda: prove_to_service(ours, SECRET)) as leader:
        near.sendall(exactly(theirs, len(HELLO) + 32))
        theirs.sendall(exactly(near, len(HELLO) + 32))
        near.sendall(exactly(theirs, 32))
        theirs.sendall(exactly(near, 34) + exactly(near, 4).replace(b"busy", b"bury"))
    assert "another secret" in str(leader[0])


def overheard(secret: bytes) -> tuple[bytes, bytes]:
    """Returns all that a leader and a service said to each other."""
    said: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    leader, first = socket.socketpair()
    second, service = socket.socketpair()

    def carry(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        while part := source.recv(100):
            kept.extend(part)
            target.sendall(part)

    with leader, first, second, service:
        carriers = [
            threading.Thread(target=carry, args=(first, second, said[0])),
            threading.Thread(target=carry, args=(second, first, said[1])),
        ]
        for carrier in carriers:
            carrier.start()
        with beside(lambda: ProvedLeader(service, secret).answer()):
            prove_to_service(leader, secret)
        for end in (leader, service):
            end.shutdown(socket.SHUT_WR)
        for carrier in carriers:
            carrier.join(60)
    return bytes(said[0]), bytes(said[1])


def test_what_was_overheard_proves_nothing_later(pair: Pair) -> None:
    ours, theirs = pair
    told, _ = overheard(SECRET)
    assert len(told) == len(HELLO) + 64
    with beside(lambda: ProvedLeader(theirs, SECRET)) as service:
        ours.sendall(told)
        assert exactly(ours, len(HELLO) + 33)[-1:] == b"-"
    assert "another secret" in str(service[0])


def test_a_leaders_own_bytes_prove_nothing_to_it(pair: Pair) -> None:
    """A peer that sends everything back has the right nonces and a proof by the right secret, of the wrong side."""
    ours, theirs = pair
    with beside(lambda: prove_to_service(ours, SECRET)) as leader:
        theirs.sendall(exactly(theirs, len(HELLO) + 32))
        proof = exactly(theirs, 32)
        theirs.sendall(b"+" + proof + b"\0")
    assert "another secret" in str(leader[0])


def test_a_service_proves_nothing_before_its_leader_has(pair: Pair) -> None:
    ours, theirs = pair
    with beside(lambda: ProvedLeader(theirs, SECRET)) as service:
        ours.sendall(HELLO + bytes(32))
        ours.sendall(exactly(ours, len(HELLO) + 32)[-32:])
    theirs.close()
    assert exactly(ours, 2) == b"-"
    assert "another secret" in str(service[0])


STRANGERS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no version": b"mlx-runner ranks \x1b]\n",
    "long garbage": b"mlx-runner tanks " + bytes(200_000),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_gets_a_line_that_says_what_this_service_is(pair: Pair, said: bytes) -> None:
    ours, theirs = pair
    with theirs:
        ours.sendall(said)
        with pytest.raises(StrangerError, match="does not speak the protocol of ranks"):
            ProvedLeader(theirs, SECRET)
    assert exactly(ours, 100) == b"This is `mlx-runner follow`, which talks to `mlx-runner --followers` only.\n"


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_leader_notices_another_service(pair: Pair, said: bytes) -> None:
    ours, theirs = pair
    theirs.sendall(said)
    with pytest.raises(RankError, match="does not speak the protocol of ranks"):
        prove_to_service(ours, SECRET)


def test_other_versions_name_each_other(pair: Pair) -> None:
    ours, theirs = pair
    with beside(lambda: ProvedLeader(theirs, SECRET)) as service:
        ours.sendall(b"mlx-runner ranks 03\n" + bytes(32))
        assert exactly(ours, len(HELLO)) == HELLO
    assert "it speaks version 03 of the protocol of ranks, and this runner 02" in str(service[0])


@pytest.mark.parametrize("said", [b"", b"mlx", HELLO + bytes(31), HELLO + bytes(32 + 31)])
def test_a_peer_that_closes_during_the_handshake_is_an_error(pair: Pair, said: bytes) -> None:
    ours, theirs = pair
    ours.sendall(said)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(RankError, match="it closed the connection"):
        ProvedLeader(theirs, SECRET)


def test_a_letter_now_and_then_has_one_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "DEADLINE_S", 0.3)
    ours, theirs = pair
    left = threading.Event()

    def drip() -> None:
        for byte in HELLO + bytes(64):
            if left.wait(0.05):
                break
            ours.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    started = monotonic()
    with pytest.raises(RankError, match="took longer than"):
        ProvedLeader(theirs, SECRET)
    left.set()
    dripping.join(60)
    assert monotonic() - started < stretched(2.0)
