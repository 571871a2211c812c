"""Amounts of memory in the spellings of people, and what they come to on a device."""

import pytest

from runner.sizes import Bound, parse_bound

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("0", Bound(0)),
        ("123456B", Bound(123456)),
        ("3k", Bound(3 << 10)),
        ("512 mb", Bound(512 << 20)),
        ("8GiB", Bound(8 * GIB)),
        ("8Gi", Bound(8 * GIB)),
        ("1.5g", Bound(3 * GIB // 2)),
        ("0.1k", Bound(102)),
        ("9007199254740993", Bound(9007199254740993)),  # no float has this value
        ("2T", Bound(2048 * GIB)),
        ("12.5 %", Bound(percent=12.5)),
        ("100%", Bound(percent=100)),
        ("8GiB,25%", Bound(8 * GIB, 25)),
        (" 25% , 8G ", Bound(8 * GIB, 25)),
    ],
)
def test_amounts_and_shares_are_understood(text: str, bound: Bound) -> None:
    assert parse_bound(text) == bound


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "8Q", "G", "%", "-1", "-5%", "+5", "1e9", "0x10", "1,000", "8G,", "8G,4G", "25%,30%", "101%", "100.1%",
        "1.", ".5", "5%%", "25%G", "8iB", "8GiBs", "٣", "inf", "nan", "8_000", "half",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an amount of memory|more than 100%"):
        parse_bound(text)


@pytest.mark.parametrize(
    ("bound", "limit_bytes", "wanted"),
    [
        (Bound(8 * GIB, 25), 16 * GIB, 4 * GIB),
        (Bound(8 * GIB, 25), 64 * GIB, 8 * GIB),
        (Bound(5 * GIB), 4 * GIB, 4 * GIB),
        (Bound(percent=12.5), 16 * GIB, 2 * GIB),
        (Bound(percent=100), 7, 7),
        (Bound(0), GIB, 0),
        (Bound(), GIB, GIB),
    ],
)
def test_the_smaller_of_both_counts_and_nothing_goes_beyond_the_device(
    bound: Bound, limit_bytes: int, wanted: int
) -> None:
    assert bound.bytes_of(limit_bytes) == wanted
