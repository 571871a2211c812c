"""A text of any length comes out part by part, and the parts are cut where it does not show."""

import json
from unittest.mock import patch

import pytest

from runner.tokenizer import Tokenizer, open_tokenizer, tokenizer
from tests.models.tokenizers import byte_level, sentencepiece

SIZE = 16
PIECES = tuple(" abdehilnort")


def opened(*, add_bos: bool) -> Tokenizer:
    definition = byte_level(special_tokens=["<s>"])
    config = {"add_bos_token": add_bos, "bos_token": "<s>"}
    files = {
        "tokenizer.json": json.dumps(definition).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": b"{}",
    }
    return open_tokenizer(files.get)


def parts(text: str) -> list[str]:
    """The parts as text: ids are bytes here."""
    with patch.object(tokenizer, "PART_CHARACTERS", SIZE):
        return [bytes(ids).decode() for ids in opened(add_bos=False).encode_parts(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("short", ["short"]),
        ("x" * SIZE, ["x" * SIZE]),
        ("x" * (SIZE + 1), ["x" * SIZE, "x"]),
        ("one line\nand another one", ["one line\n", "and another one"]),
        ("one\nline\nand another one", ["one\nline\n", "and another one"]),
        ("a paragraph\n\nand another", ["a paragraph\n\n", "and another"]),
        ("one\nindented\n  more of it", ["one\n", "indented\n  more ", "of it"]),
        ("\n" * (SIZE + 4), ["\n" * SIZE, "\n" * 4]),
        ("éééé\n" + "ж" * SIZE, ["éééé\n", "ж" * SIZE]),
    ],
)
def test_parts_end_behind_a_line_where_they_can(text: str, expected: list[str]) -> None:
    assert parts(text) == expected


def test_the_beginning_of_a_text_is_marked_once() -> None:
    marked = opened(add_bos=True)
    assert marked.bos is not None
    text = "one line\nand another one\nand a third"
    with patch.object(tokenizer, "PART_CHARACTERS", SIZE):
        ids = [token for part in marked.encode_parts(text) for token in part]
        assert list(marked.encode_parts("")) == [[marked.bos]]
    assert ids == marked.encode(text)


def test_a_tokenizer_that_marks_the_beginning_of_a_text_gets_the_whole() -> None:
    files = {"tokenizer.json": json.dumps(sentencepiece(PIECES, prepend_space=True)).encode(), "config.json": b"{}"}
    marking = open_tokenizer(files.get)
    text = "one line\nand another one\nand a third"
    with patch.object(tokenizer, "PART_CHARACTERS", SIZE):
        assert list(marking.encode_parts(text)) == [marking.encode(text)]
        assert list(marking.encode_parts("short")) == [marking.encode("short")]
