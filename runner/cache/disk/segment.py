"""The bytes of a segment: a safetensors file whose first tensor is the tokens, and whose header has a sum of the data.

    length of the header (8 bytes), header (JSON), tokens, the tensors of the records, seal

The header's metadata say everything about the segment (`Facts`); all else in the header follows from them, and is
compared. The seal is a digest of the header. So a file is whole and unchanged, or it is refused. Pure: no file is
touched here, and nothing but JSON is evaluated.
"""

import json
from array import array
from hashlib import blake2b
from math import prod
from typing import NamedTuple
from zlib import crc32

import msgspec

from runner.cache.disk.name import ENTRIES, Name
from runner.cache.disk.point import Tokens

VERSION = 2
"""Of the files; part of the name of their directory."""
MOST_BYTES = 1 << 30
"""The largest file. What is larger is not kept."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8,
    "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
"""The types of tensors, by the names of the format."""
_MOST_HEADER_BYTES = 1 << 24
SEAL_BYTES = 16
"""The digest of the header, at the end of the file."""


class SegmentError(Exception):
    """A file is not the segment that it should be. `reason` is `torn`, `crc`, `tokens` or `layers`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Tensor(msgspec.Struct, frozen=True):
    """An array of a record."""

    dtype: str
    """One of ITEM_BYTES."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Record(msgspec.Struct, frozen=True):
    """What one layer holds of the tokens [start, stop of the segment)."""

    slot: int
    start: int
    tensors: tuple[Tensor, ...]
    content: str = ""
    """Of a state: JSON of the attributes, in which arrays are numbers of tensors."""


class Facts(msgspec.Struct, frozen=True):
    """What a segment says about itself."""

    name: Name
    namespace: str
    layers: dict[str, str]
    """Every layer that the model uses, by slot: its class and sizes."""
    records: tuple[Record, ...]
    pictures: tuple[str, ...] = ()
    """Digests, in hex. In the tokens, picture k is -1 - k."""
    checkpoint: bool = False
    """True for a state or tail at a place made to return to."""
    crc: int = 0
    """The CRC-32 of the tokens and all tensors. Sums of each would say no more, and each of them waits for the
    interpreter, which the engine has while it adopts the segment before."""

    @property
    def tokens(self) -> int:
        """The number of its tokens; those of a tail or a state are not repeated."""
        return self.name.stop - self.name.start if self.name.kind == ENTRIES else 0

    @property
    def sizes(self) -> list[int]:
        """The bytes of the tokens and of each tensor."""
        return [4 * self.tokens, *(tensor.nbytes for record in self.records for tensor in record.tensors)]


class Segment(NamedTuple):
    """A segment in memory. `data` holds the tokens and the tensors, one after the other, from the start of a buffer."""

    facts: Facts
    data: memoryview

    @property
    def name(self) -> Name:
        return self.facts.name

    @property
    def tokens(self) -> Tokens:
        """Its tokens, as stored: pictures by their place in the facts."""
        return array("i", bytes(self.data[: 4 * self.facts.tokens]))

    def arrays(self, record: int) -> list[memoryview]:
        """Returns the bytes of the tensors of a record."""
        return [self.data[span] for span in self.spans(record)]

    def spans(self, record: int) -> list[slice]:
        """Returns where in `data` the tensors of a record are."""
        before = sum(len(each.tensors) for each in self.facts.records[:record])
        sizes = self.facts.sizes
        at = sum(sizes[: 1 + before])
        found = []
        for size in sizes[1 + before : 1 + before + len(self.facts.records[record].tensors)]:
            found.append(slice(at, at + size))
            at += size
        return found


def sealed(segment: Segment) -> list[memoryview]:
    """Returns the bytes of the file, in parts. Computes the sums."""
    facts, data = segment.facts, segment.data[: sum(segment.facts.sizes)]
    header = _header(msgspec.structs.replace(facts, crc=crc32(data)))
    seal = blake2b(header, digest_size=SEAL_BYTES).digest()
    return [memoryview(len(header).to_bytes(8, "little") + header), data, memoryview(seal)]


def header_bytes(length: bytes, file_bytes: int) -> int:
    """Returns the bytes of the header from the first 8 of a file. Raises SegmentError."""
    found = int.from_bytes(length, "little")
    if len(length) != 8 or found > min(_MOST_HEADER_BYTES, file_bytes - 8 - SEAL_BYTES):
        raise SegmentError("torn")
    return found


def read_facts(header: bytes, seal: bytes, name: Name, namespace: str, file_bytes: int) -> Facts:
    """Returns the facts in a header. Raises SegmentError unless it is as it was written, and they are those of this
    name and of so many bytes."""
    if blake2b(header, digest_size=SEAL_BYTES).digest() != seal:
        raise SegmentError("crc")
    try:
        facts = msgspec.json.decode(json.loads(header)["__metadata__"]["segment"], type=Facts)
        same = _header(facts) == header
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, msgspec.MsgspecError):
        raise SegmentError("crc") from None
    if not same:
        raise SegmentError("crc")
    if facts.name != name or facts.namespace != namespace:
        raise SegmentError("tokens")  # a whole file, under the name of another
    if 8 + len(header) + sum(facts.sizes) + SEAL_BYTES != file_bytes:
        raise SegmentError("torn")
    return facts


def whole(facts: Facts, data: memoryview) -> Segment:
    """Returns a segment. Raises SegmentError unless the data are as they were written."""
    if crc32(data) != facts.crc:
        raise SegmentError("crc")
    return Segment(facts, data)


def _header(facts: Facts) -> bytes:
    """Returns the header, a multiple of 8 bytes."""
    table: dict[str, object] = {
        "__metadata__": {"segment": msgspec.json.encode(facts).decode()},
        "tokens": {"dtype": "I32", "shape": [facts.tokens], "data_offsets": [0, 4 * facts.tokens]},
    }
    at = 4 * facts.tokens
    for record in facts.records:
        for index, tensor in enumerate(record.tensors):
            entry = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
            table[f"{record.slot}.{index}"] = entry
            at += tensor.nbytes
    table["seal"] = {"dtype": "U8", "shape": [SEAL_BYTES], "data_offsets": [at, at + SEAL_BYTES]}
    text = json.dumps(table, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
