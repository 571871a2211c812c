"""The table of parts, in the order of their worth, and the rows that parts yield. Imports nothing of MLX."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec

Item = TypeVar("Item")


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finding: text for people, and figures."""

    name: str
    found: str
    good: bool = True
    figures: Mapping[str, object] = {}


def guarded(rows: Callable[[Item], Iterable[Row]], items: Iterable[Item]) -> Iterator[Row]:
    """Yields the rows of each item, or one for the error that it raises, so that the others go on."""
    for item in items:
        try:
            yield from rows(item)
        except Exception as error:
            yield Row(getattr(item, "__name__", str(item)), f"{type(error).__name__}: {error}", good=False)


class Part(NamedTuple):
    """A part of the check. `rows` names a module and its function, which takes `tiny` and yields rows."""

    name: str
    what: str
    rows: str
    limit_s: float = 150
    """After this time the part is ended. Since a kernel may compile for a minute, that is no fault yet: the next run
    gives the part twice the time."""
    alone: bool = False
    """True for speeds: no other part runs meanwhile."""


_HERE = "scripts.tools.device."
INSTALLATION = Part("installation", "versions, device, memory, the demo model", _HERE + "installed:installation")
PARTS = (
    INSTALLATION,
    Part("layers", "`check --verify` of each kind of layer", _HERE + "installed:layers"),
    Part("packings", "`check --verify` of each packing and type", _HERE + "installed:packings"),
    Part("scans", "recurrent scans beside float64", _HERE + "checks:scan_rows"),
    Part("graphs", "architectures beside mlx-lm's loops, and their graphs", _HERE + "checks:graph_rows", 120),
    Part(
        "speed", "tokens and first tokens, beside mlx_lm.server and the bare loop", _HERE + "served:speed", alone=True
    ),
    Part("hybrids", "prompts of recurrent models", _HERE + "checks:hybrid_rows", alone=True),
    Part("compiled", "compiled decode steps beside plain ones", _HERE + "checks:compiled_rows", alone=True),
    Part("conformance", "what hosts expect", _HERE + "served:conformance"),
    Part("limits", "random clients, with little memory and a disk cache", _HERE + "served:limits"),
    Part("drafts", "what drafts bring", _HERE + "served:drafted", alone=True),
    Part("large", "the part `speed` with 2.8 billion parameters", _HERE + "served:large", 240, alone=True),
)
