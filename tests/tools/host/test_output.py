"""The output scanner finds what a host of each version finds, and nothing else (docs/internals/wire.md, 1.6)."""

import pytest

from scripts.tools.host.lib import RULES, OutputScanner, Rule, capture
from scripts.tools.host.lib.output import EVERY_LINE, FIRST_MARKER, LAST_OF_BOTH, LAST_STDERR, SCANNED, SCANNED_BOTH


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


@pytest.mark.parametrize(
    ("chunk", "captured"),
    [
        (
            b"level=INFO msg=x\nnote: Error: one\nout of memory\nmlx: two \t\r\nlast\n",
            {
                SCANNED_BOTH: "last",
                SCANNED: "last",
                LAST_STDERR: "last",
                LAST_OF_BOTH: "last",
                FIRST_MARKER: "Error: one",
                EVERY_LINE: "Error: one\nout of memory\nmlx: two",
            },
        ),
        (
            b"Error: a\n \t\n\r\n",
            {
                SCANNED_BOTH: "",
                SCANNED: "",
                LAST_STDERR: "Error: a",
                LAST_OF_BOTH: "Error: a",
                FIRST_MARKER: "Error: a",
                EVERY_LINE: "Error: a",
            },
        ),
        (
            b"done\nError: no newline",
            {
                SCANNED_BOTH: "Error: no newline",
                SCANNED: "Error: no newline",
                LAST_STDERR: "done",
                LAST_OF_BOTH: "done",
                FIRST_MARKER: "Error: no newline",
                EVERY_LINE: "Error: no newline",
            },
        ),
        (
            b"a failed to allocate b\n",
            {
                SCANNED_BOTH: "a failed to allocate b",
                SCANNED: "a failed to allocate b",
                LAST_STDERR: "a failed to allocate b",
                LAST_OF_BOTH: "a failed to allocate b",
                FIRST_MARKER: "",
                EVERY_LINE: "a failed to allocate b",
            },
        ),
    ],
)
def test_what_each_version_makes_of_the_same_output(chunk: bytes, captured: dict[Rule, str]) -> None:
    assert {rule: scanned(rule, chunk) for rule in RULES} == captured


@pytest.mark.parametrize("rule", [LAST_STDERR, LAST_OF_BOTH], ids=lambda rule: rule.name)
def test_256_bytes_of_a_long_line_count_and_the_rest_of_it_is_passed_over(rule: Rule) -> None:
    long = b"Error: " + b"x" * 300
    assert scanned(rule, b" " + long + b"\n") == long[:256].decode()
    assert scanned(rule, long, b"yz", b" w\n", b"  ") == long[:256].decode()
    assert scanned(rule, long, b"yz\nlast\n") == "last"
