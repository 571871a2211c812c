"""The output scanner finds what protocol.md 1.6 says a host finds, and nothing else."""

import pytest

from tests.host import MARKERS, OUT_OF_MEMORY, OutputScanner, capture


@pytest.mark.parametrize("marker", MARKERS)
def test_every_marker_is_found_anywhere_in_a_line(marker: str) -> None:
    assert capture(f"time=now {marker} the rest") == f"{marker} the rest"


@pytest.mark.parametrize("phrase", OUT_OF_MEMORY)
def test_an_out_of_memory_phrase_keeps_the_whole_line_in_any_case(phrase: str) -> None:
    assert capture(f"while loading: {phrase.upper()} at 3") == f"while loading: {phrase.upper()} at 3"


def test_the_earliest_marker_wins() -> None:
    assert capture("note: mlx: Error: x") == "mlx: Error: x"
    assert capture("RuntimeError: mlx: y") == "Error: mlx: y"


@pytest.mark.parametrize("line", ["ERROR: shouting", "level=ERROR source=a.py:1", "mlx is fine", "Errors are none", ""])
def test_harmless_lines_are_not_captured(line: str) -> None:
    assert capture(line) is None


def test_captures_accumulate_and_are_trimmed() -> None:
    scanner = OutputScanner()
    scanner.feed(b"Error: one \t\r\nfine\npanic: two\n")
    scanner.feed(b"out of memory\n")
    assert scanner.captured == "Error: one\npanic: two\nout of memory"
    assert scanner.lines[1] == "fine"


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
