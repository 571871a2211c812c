"""One expression for many texts finds the leftmost, longest match, at a cost independent of their number."""

from hypothesis import given
from hypothesis import strategies as st

from runner.tokenizer.added_tokens import literal_pattern


def matches(texts: list[str], text: str) -> list[str]:
    return [match[0] for match in literal_pattern(texts).finditer(text)]


def slow_matches(texts: list[str], text: str) -> list[str]:
    found, at = [], 0
    while at < len(text):
        longest = max((t for t in texts if text.startswith(t, at)), key=len, default="")
        at += len(longest) or 1
        found += [longest] if longest else []
    return found


@given(
    texts=st.lists(st.text("ab<>", min_size=1, max_size=5), min_size=1, max_size=12), text=st.text("ab<>c", max_size=40)
)
def test_it_finds_what_trying_every_text_at_every_place_finds(texts: list[str], text: str) -> None:
    assert matches(texts, text) == slow_matches(texts, text)


def test_a_common_beginning_is_written_once() -> None:
    """So that thousands of texts with one beginning are not tried one by one wherever a text has it."""
    texts = [f"<unused{number}>" for number in range(6000)]
    pattern = literal_pattern(texts).pattern
    assert pattern.count("<") == 1
    assert len(pattern) < 4 * len(texts)
    assert matches(texts, "".join(texts)) == texts
