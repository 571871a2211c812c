"""Points: digests of the prefixes of a prompt, by which segments are named and found.

A point covers the model (`root`), the salt and all tokens before the point. So the hash of a prompt's prefix finds a
segment that begins there, whatever conversation the segment is from. The soft tokens of a picture are hashed as the
digest of the picture's values, since a picture has another name in each process.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

Tokens: TypeAlias = "array[int]"
DigestOf: TypeAlias = Callable[[int], bytes | None]
"""Returns the digest of the picture with this (negative) name, or None if this process has forgotten the picture."""
_PICTURE = b"\xff\xff\xff\xff"  # never the bytes of a token, since the top bit of a token is 0


class UnknownMediaError(LookupError):
    """Raised for tokens of a picture whose digest is forgotten, since the point after them cannot be computed."""


class PrefixDigests:
    """The points of one prompt, computed on demand. Each new point continues the hash of the nearest earlier point."""

    def __init__(self, root: bytes, salt: str, tokens: Sequence[int], digest_of: DigestOf = lambda _: None) -> None:
        """`root` is `Namespace.root`, the key of the hash."""
        self.tokens = tokens if isinstance(tokens, array) else array("i", tokens)
        self._digest_of = digest_of
        self._offsets = [0]
        name = salt.encode()
        self._states = [blake2b(len(name).to_bytes(8, "little") + name, digest_size=16, key=root)]

    def at(self, offset: int) -> str:
        """Returns the point after the first `offset` tokens, in hex. Raises UnknownMediaError."""
        index = bisect_right(self._offsets, offset) - 1
        before, state = self._offsets[index], self._states[index]
        if before < offset:
            state = state.copy()
            state.update(self._spelled(self.tokens[before:offset], self._digest_of))
            self._offsets.insert(index + 1, offset)
            self._states.insert(index + 1, state)
        return state.hexdigest()

    def after(self, offset: int, tokens: Tokens, digest_of: DigestOf) -> str:
        """Returns the point after the prompt's first `offset` tokens followed by other `tokens`. `digest_of` knows the
        pictures in `tokens`. Raises UnknownMediaError."""
        self.at(offset)
        state = self._states[bisect_right(self._offsets, offset) - 1].copy()
        state.update(self._spelled(tokens, digest_of))
        return state.hexdigest()

    def _spelled(self, tokens: Tokens, digest_of: DigestOf) -> bytes:
        if min(tokens) >= 0:
            return tokens.tobytes()
        words: list[bytes] = []
        known: dict[int, bytes] = {}
        for token in tokens:
            if token >= 0:
                words.append(token.to_bytes(4, "little"))
                continue
            if token not in known:
                digest = digest_of(token)
                if digest is None:
                    raise UnknownMediaError(f"item {token}")
                known[token] = _PICTURE + digest
            words.append(known[token])
        return b"".join(words)
