"""The bytes of a segment: a safetensors file whose first tensor is the tokens, and whose header has a sum of the data.

    length of the header (8 bytes), header (JSON), tokens, the tensors of the records, seal

The header's metadata are the `SegmentFacts`. A reader computes the rest of the header from the metadata, and compares.
The seal is a digest of the header. So an incomplete or changed file is refused. This module touches no file: it works
on bytes, and evaluates only JSON.
"""

import json
import re
from array import array
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import prod
from struct import calcsize
from typing import NamedTuple, TypeAlias
from zlib import crc32

import msgspec

from runner import json_files
from runner.disk.points import Tokens

ENTRIES, TAIL, STATE = "kv", "tail", "state"
"""The kinds of segments. ENTRIES has the entries of sliceable layers for all tokens of the segment. TAIL has the last
entries of tail layers before the segment's end. STATE has the states of layers at the segment's end."""
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.([0-9]{1,10})-([0-9]{1,10})\.(kv|tail|state)")
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9]+\.tmp")
_NAMESPACE = re.compile(r"v([0-9]+)-[0-9a-f]{32}")


class Name(NamedTuple):
    """The name of a segment. The segment holds the tokens [start, stop) of every prompt that has the same two points.
    So a listing of the directory is enough to choose the segments of a prompt."""

    first: str
    """The point at `start`; for a tail or a state, the point at `stop`."""
    last: str
    """The point at `stop`."""
    start: int
    stop: int
    kind: str
    """ENTRIES, TAIL or STATE."""

    @property
    def file(self) -> str:
        return f"{self.first}-{self.last}.{self.start}-{self.stop}.{self.kind}"


def parse_name(file: str) -> Name | None:
    """Returns the name of a segment from a file name. None if the file is no segment."""
    found = _NAME.fullmatch(file)
    if found is None:
        return None
    first, last, start, stop, kind = found.groups()
    name = Name(first, last, int(start), int(stop), kind)
    sound = name.start < name.stop and (kind == ENTRIES or first == last) and name.file == file
    return name if sound else None


def temporary(pid: int, number: int) -> str:
    """Returns the name that a file has while process `pid` writes it."""
    return f".{pid}-{number}.tmp"


def is_temporary(file: str) -> bool:
    """Returns True for a name that `temporary` makes."""
    return _TEMPORARY.fullmatch(file) is not None


def format_of(directory: str) -> int | None:
    """Returns the format version in the name of a model's folder. None if the name is of another kind."""
    found = _NAMESPACE.fullmatch(directory)
    return int(found[1]) if found else None


VERSION = 3
"""The version of the file format and of the computation. It is a part of each folder's name. Raise it when the meaning
of a model's configuration changes."""
MOST_BYTES = 1 << 30
"""The largest accepted file. A larger file is refused as damaged."""
ITEM_FORMATS = {
    "BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "F16": "H", "BF16": "H", "I32": "i", "U32": "I",
    "F32": "f", "I64": "q", "U64": "Q", "C64": "Q",
}  # fmt: skip
"""Name of a type in files -> the `struct` format of that type or, for types that Python lacks, of the same size."""
_MOST_HEADER_BYTES = 1 << 24
SEAL_BYTES = 16
"""The size of the seal, the digest of the header at the end of the file."""


class SegmentError(Exception):
    """Raised for a file that is not the segment that its name promises. `reason` is `torn` (a wrong size), `crc` (a
    wrong sum), `tokens` (a segment of other tokens) or `layers` (a segment of other layers)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Tensor(msgspec.Struct, frozen=True):
    """The type and shape of an array in a record."""

    dtype: str
    """A key of ITEM_FORMATS."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * calcsize(ITEM_FORMATS[self.dtype])


class Record(msgspec.Struct, frozen=True):
    """The content of one layer from the token `start` to the segment's end."""

    slot: int
    start: int
    tensors: tuple[Tensor, ...]
    content: str = ""
    """A state's attributes as JSON, with an index into `tensors` in place of each array. Empty for other layers."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class SegmentFacts(msgspec.Struct, frozen=True):
    """The description of a segment, which its file's header holds."""

    name: Name
    namespace: str
    layers: dict[str, str]
    """Slot -> class and sizes of the layer, for every layer that the model uses."""
    records: tuple[Record, ...]
    pictures: tuple[str, ...] = ()
    """The digests of the pictures, in hex. The token -1 - k stands for picture k."""
    checkpoint: bool = False
    """True for a state or tail at a checkpoint."""
    crc: int = 0
    """The CRC-32 of the tokens and all tensors together. With a sum for each tensor, the disk thread would wait more
    often for Python's lock, which the engine thread holds while it inserts the segment before."""

    @property
    def tokens(self) -> int:
        """The number of tokens in the file, 0 for a tail or a state."""
        return self.name.stop - self.name.start if self.name.kind == ENTRIES else 0

    @property
    def sizes(self) -> list[int]:
        """The bytes of all tokens together, then the bytes of each tensor."""
        return [4 * self.tokens, *(tensor.nbytes for record in self.records for tensor in record.tensors)]


class Segment(NamedTuple):
    """A segment in memory. `data` holds the tokens, then the tensors, without gaps."""

    facts: SegmentFacts
    data: memoryview

    @property
    def name(self) -> Name:
        return self.facts.name

    @property
    def tokens(self) -> Tokens:
        """The stored tokens. A picture's tokens are -1 - k for its index k in the facts' `pictures`."""
        return array("i", bytes(self.data[: 4 * self.facts.tokens]))

    def spans(self, record: int) -> list[slice]:
        """Returns the slices of `data` that hold the tensors of the record with this index."""
        first = sum(len(each.tensors) for each in self.facts.records[:record])
        spans = [slice(*ends) for ends in pairwise(accumulate(self.facts.sizes))]
        return spans[first : first + len(self.facts.records[record].tensors)]


def sealed(segment: Segment) -> list[memoryview]:
    """Returns the bytes of a segment's file, with sum and seal, in parts."""
    facts, data = segment.facts, segment.data[: sum(segment.facts.sizes)]
    header = _header(msgspec.structs.replace(facts, crc=crc32(data)))
    seal = blake2b(header, digest_size=SEAL_BYTES).digest()
    return [memoryview(len(header).to_bytes(8, "little") + header), data, memoryview(seal)]


def header_bytes(length: bytes, file_bytes: int) -> int:
    """Returns the length of the header, from a file's first 8 bytes. Raises SegmentError if it cannot be right."""
    found = int.from_bytes(length, "little")
    if len(length) != 8 or found > min(_MOST_HEADER_BYTES, file_bytes - 8 - SEAL_BYTES):
        raise SegmentError("torn")
    return found


def read_facts(header: bytes, seal: bytes, name: Name, namespace: str, file_bytes: int) -> SegmentFacts:
    """Returns the facts in a header. Raises SegmentError if the header does not match the seal, or describes a file of
    another name, namespace or size."""
    if blake2b(header, digest_size=SEAL_BYTES).digest() != seal:
        raise SegmentError("crc")
    try:
        facts = msgspec.json.decode(json.loads(header)["__metadata__"]["segment"], type=SegmentFacts)
        same = _header(facts) == header
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, msgspec.MsgspecError):
        raise SegmentError("crc") from None
    if not same:
        raise SegmentError("crc")
    if facts.name != name or facts.namespace != namespace:
        raise SegmentError("tokens")  # a complete file under the name of another one
    if 8 + len(header) + sum(facts.sizes) + SEAL_BYTES != file_bytes:
        raise SegmentError("torn")
    return facts


def checked(facts: SegmentFacts, data: memoryview) -> Segment:
    """Returns the segment with these facts and data. Raises SegmentError if the data do not match the facts' sum."""
    if crc32(data) != facts.crc:
        raise SegmentError("crc")
    return Segment(facts, data)


def _header(facts: SegmentFacts) -> bytes:
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
    return text + b" " * (-len(text) % 8)  # the data are aligned


class Form(NamedTuple):
    """The description of a layer's content after a few tokens, as a segment would hold the content."""

    kind: str
    description: str
    """The class and sizes of the layer."""
    tensors: tuple[Tensor, ...]
    content: str
    grows: bool
    """True for a state whose arrays may appear later, or grow with the tokens (each array on one axis)."""


Layers: TypeAlias = dict[str, Form]
"""Slot -> form of the layer, for every layer that the model uses."""


def compare(facts: SegmentFacts, layers: Layers) -> None:
    """Raises SegmentError unless a segment has one record for each layer of the segment's kind, in the layer's form.

    Sums cannot find a segment that was written wrong. A layer would accept wrong arrays and compute nonsense."""
    described = {slot: form.description for slot, form in layers.items()}
    wanted = sorted(slot for slot, form in layers.items() if form.kind == facts.name.kind)
    known = facts.layers == described and sorted(str(record.slot) for record in facts.records) == wanted
    if not (known and all(_fits(record, layers[str(record.slot)], facts.name) for record in facts.records)):
        raise SegmentError("layers")


def _fits(record: Record, form: Form, name: Name) -> bool:
    if record.start != name.start and not (form.kind == TAIL and name.start < record.start < name.stop):
        return False  # in a tail, a layer with a shorter window starts later than the segment
    if form.grows:
        return _grown(record, form)
    tensors = form.tensors
    if form.kind != STATE:
        count = name.stop - record.start
        tensors = tuple(Tensor(each.dtype, (*each.shape[:-2], count, each.shape[-1])) for each in tensors)
    return (record.tensors, record.content) == (tensors, form.content)


def _grown(record: Record, form: Form) -> bool:
    """Returns True if a record has the form's attributes and types, and its content names each of its tensors once."""
    places = list[int]()

    def alike(found: object, known: object) -> bool:
        match found, known:
            case ["a", int(at)], ["a", int(of)]:
                places.append(at)
                return 0 <= at < len(record.tensors) and _longer(record.tensors[at], form.tensors[of])
            case ["a", int(at)], ["v", None]:
                places.append(at)
                return True
            case ["v", None], ["a", int()]:
                return True
            case ["v", value], ["v", other]:
                return type(value) is type(other) or None in (value, other)
            case ["l" | "t" as one, list(items)], ["l" | "t" as other, list(others)]:
                return one == other and len(items) == len(others) and all(map(alike, items, others))
            case ["d", dict(items)], ["d", dict(others)]:
                return items.keys() == others.keys() and all(alike(items[name], others[name]) for name in items)
        return False

    try:
        tree = json_files.parse(record.content)
    except ValueError:
        return False
    sound = all(size >= 0 for tensor in record.tensors for size in tensor.shape)
    return sound and alike(tree, json.loads(form.content)) and places == [*range(len(record.tensors))]


def _longer(tensor: Tensor, known: Tensor) -> bool:
    """Returns True if a tensor has the type of `known`, and its shape but for the size of at most one axis."""
    if (tensor.dtype, len(tensor.shape)) != (known.dtype, len(known.shape)):
        return False
    return sum(size != other for size, other in zip(tensor.shape, known.shape, strict=True)) <= 1
