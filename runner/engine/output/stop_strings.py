"""Finds stop strings in text, character by character."""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The stop strings as one automaton (Aho and Corasick): one step per character, however many and long they are.

    A state stands for the longest suffix of the text so far that is the beginning of a stop string. Empty stop strings
    match nothing. Building takes time and space in proportion to the characters in all stop strings; nothing changes
    afterwards.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.texts = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """By state: the length of the suffix that may still become a stop string."""
        self.matched = [0]
        """By state: the length of the longest stop string that ends here; 0 for none."""
        self._fallback = [0]
        for stop in self.texts:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
                self._fallback.append(0)
            state = following
        self.matched[state] = self.depth[state]

    def _link(self) -> None:
        """Links each state to that of its longest proper suffix, shallow states first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], character)
                self.matched[following] = self.matched[following] or self.matched[self._fallback[following]]
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """Returns the state after one more character of text."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)
