"""Mutual proof of a leader and the service on another machine (`mlx-runner follow`) that they know one secret.

    leader                               service
    HELLO VERSION nonce            -->
                                   <--   HELLO VERSION nonce
    HMAC("leader", nonces)         -->
                                   <--   accepted, HMAC("follower", nonces, answer), answer; or refused

The answer is empty, or says why the service will not follow now. Nonces are fresh, so nothing overheard proves anything
later; proofs name their side, so none can be sent back. Before its proof a peer can make the other side read
some hundred bytes and wait ten seconds, no more. The frames after it are neither encrypted nor authenticated.
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
"""For all of a handshake."""
_HELLO = b"mlx-runner ranks "
_VERSION = b"02\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_ACCEPTED, _REFUSED = b"+", b"-"
_MOST_ANSWER_BYTES = 200
_UNPROVED = "it has another secret: compare the files that --secret-file names"
_STRANGE = "it does not speak the protocol of ranks"
_TO_STRANGERS = b"This is `mlx-runner follow`, which talks to `mlx-runner --followers` only.\n"


class StrangerError(RankError):
    """The other side does not speak this protocol."""


def prove_to_service(connection: socket.socket, secret: bytes) -> None:
    """Does the leader's part. Raises RankError for a service that does not know the secret, or will not follow."""
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
    """A leader that has proved that it knows the secret, and waits for an answer."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        """Waits for the proof. Raises RankError if it is wrong, or does not come in time."""
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
        """Tells the leader that this side follows, or why it will not now. Raises RankError if the leader is gone."""
        text = refusal.encode()[:_MOST_ANSWER_BYTES]
        proof = _proof(self._secret, b"follower", self._nonces, text)
        _Talk(self._connection).send(_ACCEPTED + proof + bytes([len(text)]) + text)


def _proof(secret: bytes, side: bytes, nonces: bytes, answer: bytes = b"") -> bytes:
    """Returns the HMAC that proves knowledge of the secret. `nonces` are the leader's and the service's."""
    return hmac.digest(secret, _HELLO + _VERSION + side + nonces + answer, "sha256")


class _Talk:
    """Bytes between two sides, until a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until_s = monotonic() + DEADLINE_S

    def send(self, data: bytes) -> None:
        """Raises RankError."""
        try:
            self._connection.settimeout(max(0.001, self._until_s - monotonic()))
            self._connection.sendall(data)
        except OSError as error:
            raise _lost(error) from error

    def receive(self, count: int, start: bytes = b"") -> bytes:
        """Returns `count` bytes. Raises RankError, and StrangerError as soon as they cannot begin with `start`."""
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
        """Returns the other side's nonce. Raises RankError, and StrangerError if it does not send a hello. A hello of
        another version is answered with `reply`, from which the other side learns ours."""
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
        """Ends the connection so that the other side still reads what was sent: unread bytes would make the system
        throw that away."""
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
    """Returns the secret in the file, without white space around it. Raises RunnerError, with what to do, for a file
    that cannot be read, that another user may read, or whose secret is too short."""
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
