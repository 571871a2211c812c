"""Thinking is told from content as a host tells it, however the text is cut."""

import pytest

from scripts.tools.host.lib import ThinkingParser


def fed(text: str, size: int, *, opened: bool = False) -> tuple[str, str]:
    parser = ThinkingParser(opened=opened)
    thoughts = [parser.add(text[at : at + size]) for at in range(0, len(text), size)]
    return "".join(thought.thinking for thought in thoughts), "".join(thought.content for thought in thoughts)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>ab c</think> d e", ("ab c", "d e")),
        (" \n<think> \n a\n</think>\n\n b ", ("a\n", "b ")),
        ("a < b <thi", ("", "a < b <thi")),
        ("<think>a </thin b</think>c", ("a </thin b", "c")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("<thank>x", ("", "<thank>x")),
        ("<think></think>a", ("", "a")),
    ],
)
def test_the_cut_of_the_text_does_not_matter(text: str, size: int, expected: tuple[str, str]) -> None:
    assert fed(text, size) == expected


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_prompt_may_have_opened_it(size: int) -> None:
    assert fed("\nab</think>c", size, opened=True) == ("ab", "c")


def test_half_a_tag_is_held_back_until_it_is_one() -> None:
    parser = ThinkingParser()
    assert parser.add("<thi") == ("", "")
    assert parser.add("nk>ab</th") == ("ab", "")
    assert parser.add("ere") == ("</there", "")
    assert parser.add("</think>") == ("", "")
    assert parser.add("  ") == ("", "")
    assert parser.add(" c ") == ("", "c ")
