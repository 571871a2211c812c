"""The comparison of a segment with the layers of the model. Pure.

Sums find a file that has changed since it was written, not one that was wrong from the start. A layer would take arrays
of other types or sizes, and compute nonsense with them.
"""

import json
from typing import NamedTuple, TypeAlias

from runner.cache.disk.name import STATE, TAIL, Name
from runner.cache.disk.segment import Facts, Record, SegmentError, Tensor


class Form(NamedTuple):
    """The content of a layer after a few tokens, as a segment would have it."""

    kind: str
    """ENTRIES, TAIL or STATE: the kind of segments that it is in."""
    description: str
    """The class and sizes of the layer."""
    tensors: tuple[Tensor, ...]
    content: str
    """As that of a record."""
    grows: bool
    """True for a state whose arrays may be longer after more tokens, on the last axis but one, or not be there yet."""


Layers: TypeAlias = dict[str, tuple[Form, ...]]
"""Every layer that the model uses, by slot, in each form that it may have."""


def compare(facts: Facts, layers: Layers) -> None:
    """Raises SegmentError unless a segment is of these layers, of each of its kind, and of their types and shapes."""
    forms = {
        slot: form for slot, known in layers.items() for form in known if form.description == facts.layers.get(slot)
    }
    wanted = {slot for slot, form in forms.items() if form.kind == facts.name.kind}
    found = [str(record.slot) for record in facts.records]
    if not facts.layers.keys() == layers.keys() == forms.keys() or sorted(found) != sorted(wanted):
        raise SegmentError("layers")
    if not all(_fits(record, forms[str(record.slot)], facts.name) for record in facts.records):
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
    """Returns True if a state has the same attributes, of the same types, each array once."""
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
        tree = json.loads(record.content)
    except (ValueError, RecursionError):
        return False
    sound = all(size >= 0 for tensor in record.tensors for size in tensor.shape)
    return sound and alike(tree, json.loads(form.content)) and places == [*range(len(record.tensors))]


def _longer(tensor: Tensor, known: Tensor) -> bool:
    """Returns True if a tensor differs from a known one in nothing but its length."""
    at = max(0, len(known.shape) - 2)

    def fixed(each: Tensor) -> object:
        return each.dtype, len(each.shape), each.shape[:at], each.shape[at + 1 :]

    return fixed(tensor) == fixed(known)
