"""The name of a prepared picture in caches: equal names only for pictures that give equal soft tokens."""

from hashlib import blake2b

from runner.media.geometry import Geometry

DIGEST_BYTES = 32


def digest(kind: str, family: str, version: int, geometry: Geometry, data: bytes) -> bytes:
    """Returns 256 bits over what an item is made of: its kind, who prepares it and how, its size, and its bytes.

    `family` and `version` are those of a family in `runner.media.families`. Each part is preceded by its length, so
    no two lists of parts make the same stream. Bytes behind the end of a picture count: a miss at worst.
    """
    numbers = ",".join(map(str, (version, *geometry)))
    state = blake2b(digest_size=DIGEST_BYTES, person=b"runner.media")
    for part in (kind.encode(), family.encode(), numbers.encode(), data):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
