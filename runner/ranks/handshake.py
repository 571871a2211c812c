"""The handshake by which a leader and the service on another machine (`mlx-runner follow`) prove one shared secret.

    leader                               service
    HELLO VERSION nonce            -->
                                   <--   HELLO VERSION nonce
    HMAC("leader", nonces)         -->
                                   <--   accepted, HMAC("follower", nonces, answer), answer; or refused

The answer is empty, or the reason why the service refuses to follow now. Nonces are fresh, so overheard bytes prove
nothing later. A proof names its side, so it cannot be sent back as the other side's proof. Before its proof, a peer
costs the other side some hundred bytes and ten seconds at most. Later frames are neither encrypted nor authenticated.
"""

import hmac
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from time import monotonic

from runner.errors import RankError, RunnerError

DEADLINE_S = 10.0
"""The longest time of a whole handshake."""
_HELLO = b"mlx-runner ranks "
_VERSION = b"02\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_ACCEPTED, _REFUSED = b"+", b"-"
_MOST_ANSWER_BYTES = 200
_UNPROVED = "it has another secret: compare the files that --secret-file names"
_STRANGE = "it does not speak the protocol of ranks"
_TO_STRANGERS = b"This is `mlx-runner follow`, which talks to `mlx-runner --followers` only.\n"


class StrangerError(RankError):
    """The other side does not speak the protocol of ranks."""


def prove_to_service(connection: socket.socket, secret: bytes) -> None:
    """Does the leader's part of the handshake. Raises RankError if the service lacks the secret, or will not follow."""
    talk = _Talk(connection)
    ours = secrets.token_bytes(_NONCE_BYTES)
    talk.send(_HELLO + _VERSION + ours)
    nonces = ours + talk.receive_nonce()
    talk.send(_proof(secret, b"leader", nonces))
    if talk.receive(1) == _REFUSED:
        raise RankError(_UNPROVED)
    proof = talk.receive(_PROOF_BYTES)
    answer = talk.receive(talk.receive(1)[0])
    if not hmac.compare_digest(proof, _proof(secret, b"follower", nonces, answer)):
        raise RankError(_UNPROVED)
    if answer:
        raise RankError(answer.decode(errors="replace"))


class ProvedLeader:
    """A leader that has proved that it knows the secret, and now waits for an answer."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        """Waits for the leader's proof. Raises RankError if the proof is wrong or late."""
        self._connection = connection
        self._secret = secret
        talk = _Talk(connection)
        ours = secrets.token_bytes(_NONCE_BYTES)
        try:
            theirs = talk.receive_nonce(_HELLO + _VERSION)
        except StrangerError:
            with suppress(RankError):
                talk.send(_TO_STRANGERS)
            talk.hang_up()
            raise
        talk.send(_HELLO + _VERSION + ours)
        self._nonces = theirs + ours
        if not hmac.compare_digest(talk.receive(_PROOF_BYTES), _proof(secret, b"leader", self._nonces)):
            talk.send(_REFUSED)
            raise RankError(_UNPROVED)

    def answer(self, refusal: str = "") -> None:
        """Tells the leader that this side follows or, with `refusal`, why not. Raises RankError if the leader is
        gone."""
        text = refusal.encode()[:_MOST_ANSWER_BYTES]
        proof = _proof(self._secret, b"follower", self._nonces, text)
        _Talk(self._connection).send(_ACCEPTED + proof + bytes([len(text)]) + text)


def _proof(secret: bytes, side: bytes, nonces: bytes, answer: bytes = b"") -> bytes:
    """Returns the HMAC by which `side` proves that it knows the secret. `nonces`: the leader's, then the service's."""
    return hmac.digest(secret, _HELLO + _VERSION + side + nonces + answer, "sha256")


class _Talk:
    """An exchange of bytes with the other side, which must end by a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until_s = monotonic() + DEADLINE_S

    def send(self, data: bytes) -> None:
        """Sends all of `data`. Raises RankError if the connection fails, or at the deadline."""
        try:
            self._connection.settimeout(max(0.001, self._until_s - monotonic()))
            self._connection.sendall(data)
        except OSError as error:
            raise _lost(error) from error

    def receive(self, count: int, start: bytes = b"") -> bytes:
        """Returns `count` bytes. Raises RankError if they do not arrive, and StrangerError once they differ from
        `start`."""
        data = b""
        while len(data) < count:
            try:
                self._connection.settimeout(max(0.001, self._until_s - monotonic()))
                part = self._connection.recv(count - len(data))
            except OSError as error:
                raise _lost(error) from error
            if not part:
                raise RankError("it closed the connection")
            data += part
            if not data.startswith(start[: len(data)]):
                raise StrangerError(_STRANGE)
        return data

    def receive_nonce(self, reply: bytes = b"") -> bytes:
        """Returns the other side's nonce. Raises RankError, and StrangerError if the other side sends no hello. If the
        hello has another version, sends `reply`, which tells the other side our version."""
        self.receive(len(_HELLO), _HELLO)
        version = self.receive(len(_VERSION))
        if not version.strip().isdigit():
            raise StrangerError(_STRANGE)
        if version != _VERSION:
            with suppress(RankError):
                self.send(reply)
            theirs = version.decode("ascii", "replace").strip()
            raise RankError(
                f"it speaks version {theirs} of the protocol of ranks, and this runner {_VERSION.decode().strip()}:"
                " install the same mlx-runner on all machines"
            )
        return self.receive(_NONCE_BYTES)

    def hang_up(self) -> None:
        """Closes the connection, and reads its input: with unread input, the system would discard the bytes just
        sent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.setblocking(False)
            self._connection.recv(1 << 16)


def _lost(error: OSError) -> RankError:
    if isinstance(error, TimeoutError):
        return RankError(f"it took longer than {DEADLINE_S:.0f} s to answer")
    return RankError(f"the connection is gone: {error.strerror or error}")


_LEAST_BYTES, _MOST_BYTES = 16, 4096


def read_secret(path: Path) -> bytes:
    """Returns the secret in the file at `path`, without white space around it. Raises RunnerError, with advice, for a
    file that cannot be read, that another user can read, or whose secret is too short."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _fault(path, "not a file")
            if found.st_uid != os.geteuid():
                raise _fault(path, "it belongs to another user: copy it to a file of your own")
            if found.st_mode & 0o077:
                raise _fault(path, f"other users may read or change it: chmod 600 {path}")
            secret = file.read(_MOST_BYTES + 1).strip()
    except FileNotFoundError:
        why = "no such file: make one (umask 077; openssl rand -hex 32 > FILE), and copy it to every machine"
        raise _fault(path, why) from None
    except OSError as error:
        raise _fault(path, str(error.strerror)) from error
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        why = f"a secret has {_LEAST_BYTES} to {_MOST_BYTES} bytes: make one with openssl rand -hex 32"
        raise _fault(path, why)
    return secret


def _fault(path: Path, why: str) -> RunnerError:
    return RunnerError(f"--secret-file {path}: {why}")
