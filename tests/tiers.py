"""Which tests run only with `scripts/test --full`: products, of which the fast tier keeps one of each kind.

A key is a test file, or a test in it; its value the parameters that stay in the fast tier, as patterns for the text in
brackets. Single tests have the marks `full` and `slow` instead.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

FULL: Mapping[str, tuple[str, ...]] = {}


def is_full(nodeid: str) -> bool:
    """True if the table leaves this test to the full tier."""
    path, _, rest = nodeid.partition("::")
    name, _, parameters = rest.partition("[")
    for key in (f"{path}::{name}", path):
        if key in FULL:
            return not any(fnmatchcase(parameters.removesuffix("]"), pattern) for pattern in FULL[key])
    return False
