"""The table of parts, in the order of their worth, and the rows that parts yield. Imports nothing of MLX."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finding: text for people, and figures."""

    name: str
    found: str
    good: bool = True
    figures: Mapping[str, object] = {}


class Part(NamedTuple):
    """A part of the check. `rows` names a module of this package and its function: `rows(*, tiny)` yields rows."""

    name: str
    what: str
    rows: str
    limit_s: float = 150
    """After this time the part is ended. A first run may need longer, since a kernel may compile for a minute: it
    counts as a fault if it happens twice."""
    alone: bool = False
    """True for speeds: no other part runs meanwhile."""


INSTALLATION = Part("installation", "versions, device, memory, the demo model", "installed:installation")
PARTS = (
    INSTALLATION,
    Part("layers", "`check --verify` of each kind of layer", "installed:layers"),
    Part("packings", "`check --verify` of each packing and type", "installed:packings", 240),
    Part("scans", "recurrent scans beside float64", "checks:scan_rows"),
    Part("graphs", "every architecture beside mlx-lm's loops, and its graph", "checks:graph_rows", 240),
    Part(
        "speed",
        "tokens per second and first tokens, beside mlx_lm.server and the bare loop",
        "served:speed",
        alone=True,
    ),
    Part("hybrids", "prompts of recurrent models, batches, attention", "checks:hybrid_rows", alone=True),
    Part("conformance", "what hosts expect", "served:conformance"),
    Part("limits", "random clients, with little memory and a disk cache", "served:limits"),
    Part("drafts", "what drafts bring", "served:drafted", alone=True),
    Part("large", "the part `speed` with 2.8 billion parameters", "served:large", 240, alone=True),
)
