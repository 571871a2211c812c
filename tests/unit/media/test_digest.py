"""Names of prepared pictures differ when anything differs."""

from itertools import combinations

from runner.media.geometry import Geometry, grid
from runner.media.support import DIGEST_BYTES, digest

GEOMETRY = grid(64, 32, 16, 2)


def test_a_digest_depends_on_kind_family_geometry_and_data() -> None:
    other = [GEOMETRY._replace(**{field: getattr(GEOMETRY, field) + 1}) for field in Geometry._fields]
    names = [
        digest("image", "qwen3_5", GEOMETRY, b"data"),
        digest("audio", "qwen3_5", GEOMETRY, b"data"),
        digest("image", "gemma4", GEOMETRY, b"data"),
        *(digest("image", "qwen3_5", geometry, b"data") for geometry in other),
        digest("image", "qwen3_5", GEOMETRY, b"Data"),
        digest("image", "qwen3_5", GEOMETRY, b"data\0"),
        digest("image", "qwen3_5", GEOMETRY, b""),
    ]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {DIGEST_BYTES}


def test_parts_do_not_flow_into_each_other() -> None:
    cases = [("ab", "c", b""), ("a", "bc", b""), ("", "abc", b""), ("abc", "", b""), ("a", "b", b"c"), ("", "", b"abc")]
    names = [digest(kind, family, GEOMETRY, data) for kind, family, data in cases]
    assert all(a != b for a, b in combinations(names, 2))


def test_it_is_the_same_in_every_process() -> None:
    assert digest("image", "qwen3_5", GEOMETRY, b"data").hex() == (
        "932768178875dc97fd3db993402b7140b6c28e9a3c90c36f6b7c4de002fc118e"
    )
