"""One line stays below the log, and neither of them gets into the other."""

import os
import re
import termios
import threading
import tty
from collections.abc import Iterator

import pytest

from runner.terminal import StatusLine
from tests.lib.programs import python


class Screen:
    """A terminal, and what stands on it."""

    def __init__(self) -> None:
        self.outside, self.inside = os.openpty()
        tty.setraw(self.inside)  # a newline goes down and stays in its column, so lines begin with a return
        os.set_blocking(self.outside, False)
        self.written = b""

    def size(self, columns: int) -> None:
        termios.tcsetwinsize(self.inside, (24, columns))

    @property
    def lines(self) -> list[str]:
        """Without blanks at the ends."""
        while True:
            try:
                self.written += os.read(self.outside, 65536)
            except BlockingIOError:
                break
        rows = [""]
        column = 0
        for character in self.written.decode():
            if character == "\n":
                rows.append("")
                column = 0
            elif character == "\r":
                column = 0
            else:
                rows[-1] = rows[-1].ljust(column)[:column] + character + rows[-1][column + 1 :]
                column += 1
        return [row.rstrip() for row in rows]

    def close(self) -> None:
        os.close(self.outside)
        os.close(self.inside)


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.close()


@pytest.fixture
def line(screen: Screen) -> StatusLine:
    line = StatusLine(screen.inside)
    assert line.enable()
    return line


def test_log_lines_go_by_above_it(screen: Screen, line: StatusLine) -> None:
    line.show("10 %, of something long")
    line.write(b"one\n")
    line.write(b"two\n")
    line.show("20 %")
    line.write(b"three\n")
    assert screen.lines == ["one", "two", "three", "20 %"]


def test_a_line_never_wraps(screen: Screen, line: StatusLine) -> None:
    """A line that wraps would leave its first row behind."""
    for columns, shown in ((20, 19), (0, 79)):  # without a width: the usual one
        screen.size(columns)
        line.show("x" * 100)
        assert screen.lines == ["x" * shown]
        line.show("")


def test_nothing_is_shown_to_who_reads_a_pipe() -> None:
    outside, inside = os.pipe()
    line = StatusLine(inside)
    assert not line.enable()
    assert not line.show("text")
    line.write(b"a log line\n")
    assert os.read(outside, 100) == b"a log line\n"
    os.close(outside)
    os.close(inside)


def test_a_terminal_that_was_stopped_stops_nobody(screen: Screen, line: StatusLine) -> None:
    line.show("10 %")
    termios.tcflow(screen.inside, termios.TCOOFF)
    shower = threading.Thread(target=line.show, args=("20 %",), daemon=True)
    shower.start()
    shower.join(5)
    assert not shower.is_alive(), "it waits for the terminal"
    termios.tcflow(screen.inside, termios.TCOON)
    assert line.show("30 %")
    assert screen.lines == ["30 %"]
    assert b"20 %" not in screen.written


def test_the_log_and_the_last_words_stand_above_it(screen: Screen) -> None:
    screen.size(120)
    code = (
        "from runner import logs; from runner.terminal import STATUS_LINE as line\n"
        "logs.start(20); line.enable(); line.show('10 % of it'); logs.Log('x').info('a line')\n"
        "line.show('20 %'); logs.fatal('gone')"
    )
    python("-c", code, stderr=screen.inside)
    first, *rest = screen.lines
    assert re.fullmatch(r'time=\S+ level=INFO source=\S+ msg="a line"', first)
    assert rest == ["Error: gone", ""]
