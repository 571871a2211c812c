"""The output scanner finds what a host of each version finds, and nothing else (docs/internals/wire.md, 1.6)."""

import pytest

from scripts.tools.host.lib import GENERATIONS, MARKERS, OUT_OF_MEMORY, RULES, OutputScanner, Rule, capture
from scripts.tools.host.lib.output import EVERY_LINE, FIRST_MARKER, LAST_OF_BOTH, LAST_STDERR, SCANNED, SCANNED_BOTH


def scanned(rule: Rule, *chunks: bytes) -> str:
    scanner = OutputScanner(rule)
    for chunk in chunks:
        scanner.feed(chunk)
    scanner.end()
    return scanner.captured


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


@pytest.mark.parametrize("rule", [SCANNED_BOTH, SCANNED, LAST_STDERR, LAST_OF_BOTH], ids=lambda rule: rule.name)
def test_the_last_line_is_whole_however_it_is_read(rule: Rule) -> None:
    text = b"Error: one\nError: two words\n"
    assert scanned(rule, *(text[at : at + 1] for at in range(len(text)))) == "Error: two words"


@pytest.mark.parametrize("rule", [SCANNED_BOTH, SCANNED], ids=lambda rule: rule.name)
def test_a_line_above_64_kib_stops_a_scanning_host(rule: Rule) -> None:
    scanner = OutputScanner(rule)
    assert scanner.feed(b"first\n" + b"x" * 65535 + b"\n")
    assert scanner.captured == "x" * 65535
    assert not scanner.feed(b"last\n" + b"y" * 65536 + b"\n")
    scanner.end()
    assert scanner.captured == "last"
    unfinished = OutputScanner(rule)
    assert unfinished.feed(b"z" * 65535)
    assert not unfinished.feed(b"z")
    unfinished.end()
    assert unfinished.captured == ""


@pytest.mark.parametrize("rule", [LAST_STDERR, LAST_OF_BOTH], ids=lambda rule: rule.name)
def test_256_bytes_of_a_long_line_count_and_the_rest_of_it_is_passed_over(rule: Rule) -> None:
    long = b"Error: " + b"x" * 300
    assert scanned(rule, b" " + long + b"\n") == long[:256].decode()
    assert scanned(rule, long) == long[:256].decode(), "more than 256 bytes need no newline"
    assert scanned(rule, long, b"yz", b" w\n", b"  ") == long[:256].decode()
    assert scanned(rule, long, b"yz\nlast\n") == "last"


def test_two_matches_in_one_chunk_are_one_for_the_hosts_before_v0_30() -> None:
    assert scanned(FIRST_MARKER, b"Error: one\nError: two\n", b"Error: three\n") == "Error: one\nError: three"


def test_each_rule_belongs_to_a_generation_and_the_newest_comes_last() -> None:
    assert {rule for generation in GENERATIONS for rule in generation.rules} == set(RULES)
    for generation in GENERATIONS:
        assert [RULES.index(rule) for rule in generation.rules] == sorted(map(RULES.index, generation.rules))
    letters = {generation.letter: [RULES.index(rule) for rule in generation.rules] for generation in GENERATIONS}
    assert letters["A"] == [0, 1]
    assert letters["C"] == [1, 2]
    assert letters["E"] == [2, 3, 4, 5]
    assert letters["G"] == [5]


def test_what_passes_through_is_kept_but_not_remembered() -> None:
    scanner = OutputScanner(LAST_STDERR)
    scanner.pass_through(b"Error: out\n")
    scanner.feed(b"err\n")
    assert (scanner.captured, scanner.stdout) == ("err", "Error: out\n")
    assert scanner.lines == ["Error: out", "err"]
