"""A text of any length is encoded in parts, split where it makes no difference."""

import json
from unittest.mock import patch

import pytest

from runner.tokenizer import Tokenizer, open_tokenizer, tokenizer
from scripts.tools.models.tokenizers import byte_level, sentencepiece

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
    """Returns the parts as text; ids are bytes here."""
    with patch.object(tokenizer, "PART_CHARACTERS", SIZE):
        return [bytes(ids).decode() for ids in opened(add_bos=False).encode_parts([text])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("x" * SIZE, ["x" * SIZE]),
        ("x" * (SIZE + 1), ["x" * SIZE, "x"]),
        ("one line\nand another one", ["one line\n", "and another one"]),
        ("a paragraph\n\nand another", ["a paragraph\n\n", "and another"]),
        ("one\nindented\n  more of it", ["one\n", "indented\n  more ", "of it"]),
        ("\n" * (SIZE + 4), ["\n" * SIZE, "\n" * 4]),
        ("éééé\n" + "ж" * SIZE, ["éééé\n", "ж" * SIZE]),
    ],
)
def test_parts_end_behind_a_line_where_they_can(text: str, expected: list[str]) -> None:
    assert parts(text) == expected


@pytest.mark.parametrize("size", [1, SIZE])
def test_the_pieces_in_which_a_text_comes_are_not_the_parts(size: int) -> None:
    text = "one line\nand another one\nand a third, which has no end for long"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    with patch.object(tokenizer, "PART_CHARACTERS", SIZE):
        whole = list(opened(add_bos=True).encode_parts([text]))
        assert list(opened(add_bos=True).encode_parts(pieces)) == whole
    assert len(whole) > 3


@pytest.mark.parametrize("text", ["one line\nand another one\nand a third", "a line that ends nowhere, not even here"])
def test_the_beginning_of_a_text_is_marked_once_by_tokenizers_that_do_so_themselves(text: str) -> None:
    files = {"tokenizer.json": json.dumps(sentencepiece(PIECES, prepend_space=True)).encode(), "config.json": b"{}"}
    marking = open_tokenizer(files.get)
    with patch.object(tokenizer, "PART_CHARACTERS", SIZE):
        found = list(marking.encode_parts([text]))
        assert list(marking.encode_parts(["short"])) == [marking.encode("short")]
    assert len(found) > 2
    assert [token for ids in found for token in ids] == marking.encode(text)


def test_the_longest_token_is_found_among_the_added_ones_too() -> None:
    assert opened(add_bos=False).longest_bytes == len("<s>")
    files = {"tokenizer.json": json.dumps(sentencepiece(("abcdefgh",))).encode(), "config.json": b"{}"}
    assert open_tokenizer(files.get).longest_bytes == 8
