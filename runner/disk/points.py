"""Points: digests of the prefixes of a prompt, by which segments are named and found.

A point covers the model (`root`), the salt and all tokens before it. So a prompt finds the segments of its prefixes by
hashing itself, wherever these were cut. A picture counts by the digest of its values for the model, never by its name
in one process.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

Tokens: TypeAlias = "array[int]"
DigestOf: TypeAlias = Callable[[int], bytes | None]
"""Returns the digest of the picture with a negative name; None if it is forgotten."""
_PICTURE = b"\xff\xff\xff\xff"  # no token: their top bit is 0


class UnknownMediaError(LookupError):
    """An item's digest is forgotten: its tokens have no point."""


class PrefixDigests:
    """The points of one prompt, computed on demand: each costs a hash over the tokens since the nearest earlier
    point."""

    def __init__(self, root: bytes, salt: str, tokens: Sequence[int], digest_of: DigestOf = lambda _: None) -> None:
        """`root` is the key of the namespace."""
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
        """Returns the point after the first `offset` tokens and then `tokens`, whose pictures `digest_of` knows. Raises
        UnknownMediaError."""
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
