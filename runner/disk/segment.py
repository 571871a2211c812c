"""The bytes of a segment: a safetensors file whose first tensor is the tokens, and whose header has a sum of the data.

    length of the header (8 bytes), header (JSON), tokens, the tensors of the records, seal

The header's metadata describe the segment (`SegmentFacts`). The rest of the header follows from them, and a reader
compares it. The seal is a digest of the header. So a file is complete and unchanged, or it is refused. This module is
pure: it touches no file and evaluates only JSON.
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
"""The kinds of segments: the entries of sliceable layers for all tokens of the segment; for layers with a tail, the
last entries at its end; the states of layers at its end."""
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.([0-9]{1,10})-([0-9]{1,10})\.(kv|tail|state)")
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9]+\.tmp")
_NAMESPACE = re.compile(r"v([0-9]+)-[0-9a-f]{32}")


class Name(NamedTuple):
    """The name of a segment, which holds the tokens [start, stop) of every prompt with these points. Names carry the
    index, so a plan needs only a listing of the directory."""

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
    """Returns the segment that a file is named after; None if the file is no segment."""
    found = _NAME.fullmatch(file)
    if found is None:
        return None
    first, last, start, stop, kind = found.groups()
    name = Name(first, last, int(start), int(stop), kind)
    sound = name.start < name.stop and (kind == ENTRIES or first == last) and name.file == file
    return name if sound else None


def temporary(pid: int, number: int) -> str:
    """Returns the name of a file while it is written."""
    return f".{pid}-{number}.tmp"


def is_temporary(file: str) -> bool:
    """Returns True for a name that `temporary` makes."""
    return _TEMPORARY.fullmatch(file) is not None


def format_of(directory: str) -> int | None:
    """Returns the version of the files in a directory of segments; None for any other directory."""
    found = _NAMESPACE.fullmatch(directory)
    return int(found[1]) if found else None


VERSION = 3
"""The version of the files and of the computation that made them; part of the name of their directory. Raise it when
the meaning of a model's configuration changes."""
MOST_BYTES = 1 << 30
"""The largest file; a larger segment is not kept."""
ITEM_FORMATS = {
    "BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "F16": "H", "BF16": "H", "I32": "i", "U32": "I",
    "F32": "f", "I64": "q", "U64": "Q", "C64": "Q",
}  # fmt: skip
"""The types of tensors, by their names in files, and the formats by which Python reads items of that type, or size."""
_MOST_HEADER_BYTES = 1 << 24
SEAL_BYTES = 16
"""The digest of the header, at the end of the file."""


class SegmentError(Exception):
    """A file that is not the segment of its name. `reason` is `torn`, `crc`, `tokens` or `layers`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Tensor(msgspec.Struct, frozen=True):
    """The form of an array of a record."""

    dtype: str
    """One of ITEM_FORMATS."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * calcsize(ITEM_FORMATS[self.dtype])


class Record(msgspec.Struct, frozen=True):
    """The content of one layer for the tokens [start, stop of the segment)."""

    slot: int
    start: int
    tensors: tuple[Tensor, ...]
    content: str = ""
    """The JSON of a state's attributes, in which each array is the number of its tensor; empty for other layers."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class SegmentFacts(msgspec.Struct, frozen=True):
    """The description of a segment in its file."""

    name: Name
    namespace: str
    layers: dict[str, str]
    """The class and sizes of every layer that the model uses, by slot."""
    records: tuple[Record, ...]
    pictures: tuple[str, ...] = ()
    """The digests of the pictures, in hex. In the tokens, picture k is -1 - k."""
    checkpoint: bool = False
    """True for a state or tail at a checkpoint."""
    crc: int = 0
    """The CRC-32 of the tokens and all tensors. One sum for each tensor would wait more often for the interpreter,
    which the engine holds while it takes the segment before."""

    @property
    def tokens(self) -> int:
        """The number of stored tokens: none for a tail or a state."""
        return self.name.stop - self.name.start if self.name.kind == ENTRIES else 0

    @property
    def sizes(self) -> list[int]:
        """The bytes of the tokens and of each tensor."""
        return [4 * self.tokens, *(tensor.nbytes for record in self.records for tensor in record.tensors)]


class Segment(NamedTuple):
    """A segment in memory. `data` starts with the tokens, then the tensors, without gaps."""

    facts: SegmentFacts
    data: memoryview

    @property
    def name(self) -> Name:
        return self.facts.name

    @property
    def tokens(self) -> Tokens:
        """The tokens as they are stored: each picture by its place in the facts."""
        return array("i", bytes(self.data[: 4 * self.facts.tokens]))

    def spans(self, record: int) -> list[slice]:
        """Returns the places in `data` of the tensors of a record."""
        first = sum(len(each.tensors) for each in self.facts.records[:record])
        spans = [slice(*ends) for ends in pairwise(accumulate(self.facts.sizes))]
        return spans[first : first + len(self.facts.records[record].tensors)]


def sealed(segment: Segment) -> list[memoryview]:
    """Computes the sums, and returns the bytes of the file in parts."""
    facts, data = segment.facts, segment.data[: sum(segment.facts.sizes)]
    header = _header(msgspec.structs.replace(facts, crc=crc32(data)))
    seal = blake2b(header, digest_size=SEAL_BYTES).digest()
    return [memoryview(len(header).to_bytes(8, "little") + header), data, memoryview(seal)]


def header_bytes(length: bytes, file_bytes: int) -> int:
    """Returns the length of the header, given the first 8 bytes of a file. Raises SegmentError."""
    found = int.from_bytes(length, "little")
    if len(length) != 8 or found > min(_MOST_HEADER_BYTES, file_bytes - 8 - SEAL_BYTES):
        raise SegmentError("torn")
    return found


def read_facts(header: bytes, seal: bytes, name: Name, namespace: str, file_bytes: int) -> SegmentFacts:
    """Returns the facts in a header. Raises SegmentError if the header has changed since it was written, or describes a
    file of another name or size."""
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
    """Returns the segment of these data. Raises SegmentError if they have changed since they were written."""
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
    """The content of a layer after a few tokens, in the form that a segment would give it."""

    kind: str
    description: str
    """The class and sizes of the layer."""
    tensors: tuple[Tensor, ...]
    content: str
    grows: bool
    """True for a state whose arrays may grow with the tokens, each on one axis, or appear later."""


Layers: TypeAlias = dict[str, Form]
"""The form of every layer that the model uses, by slot."""


def compare(facts: SegmentFacts, layers: Layers) -> None:
    """Raises SegmentError unless a segment has each layer of its kind once, with its types and shapes.

    Sums cannot find a segment that was wrong from the start. A layer would accept its arrays and compute nonsense."""
    described = {slot: form.description for slot, form in layers.items()}
    wanted = sorted(slot for slot, form in layers.items() if form.kind == facts.name.kind)
    known = facts.layers == described and sorted(str(record.slot) for record in facts.records) == wanted
    if not (known and all(_fits(record, layers[str(record.slot)], facts.name) for record in facts.records)):
        raise SegmentError("layers")


def _fits(record: Record, form: Form, name: Name) -> bool:
    if record.start != name.start and not (form.kind == TAIL and name.start < record.start < name.stop):
        return False  # windows of other lengths begin elsewhere
    if form.grows:
        return _grown(record, form)
    tensors = form.tensors
    if form.kind != STATE:
        count = name.stop - record.start
        tensors = tuple(Tensor(each.dtype, (*each.shape[:-2], count, each.shape[-1])) for each in tensors)
    return (record.tensors, record.content) == (tensors, form.content)


def _grown(record: Record, form: Form) -> bool:
    """Returns True if a state has the attributes and types of the form, and refers to each of its tensors once."""
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
    """Returns True if a tensor has the type of a known one, and the same shape but for at most one axis."""
    if (tensor.dtype, len(tensor.shape)) != (known.dtype, len(known.shape)):
        return False
    return sum(size != other for size, other in zip(tensor.shape, known.shape, strict=True)) <= 1
