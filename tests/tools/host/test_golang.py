"""Go's words and forms."""

import math

import pytest

from scripts.tools.host.lib.golang import (
    LONGEST_S,
    duration_s,
    host_duration_s,
    keep_alive_s,
    signal_name,
    utf8_text,
    valid_text,
)


@pytest.mark.parametrize(
    ("number", "name"),
    [(2, "interrupt"), (9, "killed"), (11, "segmentation fault"), (15, "terminated"), (40, "signal 40")],
)
def test_signals_have_gos_names(number: int, name: str) -> None:
    assert signal_name(number) == name


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), (".5s", 0.5), ("-1m", -60), ("+2s", 2), ("0", 0), ("250ms", 0.25)],
)
def test_durations_are_read_as_go_writes_them(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "m", "5x", "5 m", "5m ", "--5m", "1h-5m", "9999999h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid duration"):
        duration_s(text)


def test_keep_alive_is_seconds_or_a_duration_and_negative_is_for_ever() -> None:
    assert [keep_alive_s(value) for value in (0, 1.5, "10m", -1, "-1s")] == [0, 1.5, 600, math.inf, math.inf]
    assert [keep_alive_s(value) for value in (1e12, "2562047h")] == [LONGEST_S, 2562047 * 3600]
    for value in (True, None, ["5m"]):
        with pytest.raises(ValueError, match="Unsupported type"):
            keep_alive_s(value)


def test_a_hosts_variable_may_be_whole_seconds() -> None:
    assert [host_duration_s(text) for text in ("90", " 90s ", "-1")] == [90, 90, -1]


def test_what_is_no_unicode_becomes_the_replacement_character() -> None:
    assert utf8_text("é".encode() + b"\xff\xed\xa0\x80") == "é" + "\ufffd" * 4
    assert valid_text("\ufeffé\ud83d\ude00 \ud800 \udc00\ud800") == "\ufeffé\U0001f600 \ufffd \ufffd\ufffd"
