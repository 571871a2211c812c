"""The output scanner finds what a host of each version finds, and nothing else (docs/internals/wire.md, 1.6)."""

import pytest

from scripts.tools.host.lib import RULES, OutputScanner, Rule, capture
from scripts.tools.host.lib.output import LAST_OF_BOTH, LAST_STDERR


def scanned(rule: Rule, *chunks: bytes) -> str:
    scanner = OutputScanner(rule)
    for chunk in chunks:
        scanner.feed(chunk)
    scanner.end()
    return scanner.captured


def test_the_earliest_marker_wins() -> None:
    assert capture("note: mlx: Error: x") == "mlx: Error: x"
    assert capture("RuntimeError: mlx: y") == "Error: mlx: y"


@pytest.mark.parametrize("line", ["ERROR: shouting", "level=ERROR source=a.py:1", "mlx is fine", "Errors are none", ""])
def test_harmless_lines_are_not_captured(line: str) -> None:
    assert capture(line) is None


def test_a_marker_cut_by_a_read_is_lost_as_in_the_host() -> None:
    scanner = OutputScanner()
    scanner.feed(b"ValueErr")
    scanner.feed(b"or: boom\n")
    assert scanner.captured == ""
    assert scanner.text == "ValueError: boom\n"


def test_the_oldest_captures_go_when_there_are_8_kib() -> None:
    scanner = OutputScanner()
    for number in range(200):
        scanner.feed(f"Error: {number:03d} {'x' * 89}\n".encode())
    assert len(scanner.captured) <= 8192
    assert scanner.captured.startswith("Error: 1")
    assert scanner.captured.endswith("x")


CHUNKS = {
    b"level=INFO msg=x\nnote: Error: one\nout of memory\nmlx: two \t\r\nlast\n": (
        *("last", "last", "last", "last", "Error: one", "Error: one\nout of memory\nmlx: two"),
    ),
    b"Error: a\n \t\n\r\n": ("", "", *["Error: a"] * 4),
    b"done\nError: no newline": (*["Error: no newline"] * 2, *["done"] * 2, *["Error: no newline"] * 2),
    b"a failed to allocate b\n": (*["a failed to allocate b"] * 4, "", "a failed to allocate b"),
}
"""The text that each version, the oldest first, captures of a chunk."""


@pytest.mark.parametrize("chunk", CHUNKS)
def test_each_version_captures_its_own_of_the_same_output(chunk: bytes) -> None:
    assert tuple(scanned(rule, chunk) for rule in RULES) == CHUNKS[chunk]


@pytest.mark.parametrize("rule", [LAST_STDERR, LAST_OF_BOTH], ids=lambda rule: rule.name)
def test_256_bytes_of_a_long_line_count_and_the_rest_of_it_is_passed_over(rule: Rule) -> None:
    long = b"Error: " + b"x" * 300
    assert scanned(rule, b" " + long + b"\n") == long[:256].decode()
    assert scanned(rule, long, b"yz", b" w\n", b"  ") == long[:256].decode()
    assert scanned(rule, long, b"yz\nlast\n") == "last"
