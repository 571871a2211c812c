"""Tells thinking from content in a stream of text, as a host does for models whose template has thinking tags."""

from typing import Literal, NamedTuple

State = Literal["opening", "thinking starts", "thinking", "content starts", "content"]


class Thought(NamedTuple):
    """One piece of text, told apart as thinking or content."""

    thinking: str
    content: str


class ThinkingParser:
    """Fed with text as it comes; whitespace around the tags goes, half a tag is held back."""

    def __init__(self, opening: str = "<think>", closing: str = "</think>", *, opened: bool = False) -> None:
        """`opened` when the prompt already ends with the opening tag."""
        self._opening = opening
        self._closing = closing
        self._state: State = "thinking starts" if opened else "opening"
        self._held = ""

    def add(self, text: str) -> Thought:
        """Returns the pieces that are certain by now."""
        held, self._held = self._held + text, ""
        if self._state == "opening":
            bare = held.lstrip()
            if self._opening.startswith(bare):
                if bare != self._opening:
                    self._held = held
                    return Thought("", "")
            elif not bare.startswith(self._opening):
                self._state = "content"
                return Thought("", held)
            held = bare.removeprefix(self._opening)
            self._state = "thinking starts"
        if self._state == "thinking starts":
            held = held.lstrip()
            if not held:
                return Thought("", "")
            self._state = "thinking"
        thinking = ""
        if self._state == "thinking":
            thinking, closed, held = held.partition(self._closing)
            if not closed:
                thinking, self._held = self._without_tag_start(thinking)
                return Thought(thinking, "")
            self._state = "content starts"
        if self._state == "content starts":
            held = held.lstrip()
            if held:
                self._state = "content"
        return Thought(thinking, held)

    def _without_tag_start(self, text: str) -> tuple[str, str]:
        """Splits off an end that may become the closing tag."""
        longest = min(len(text), len(self._closing) - 1)
        size = next((size for size in range(longest, 0, -1) if text.endswith(self._closing[:size])), 0)
        return text[: len(text) - size], text[len(text) - size :]
