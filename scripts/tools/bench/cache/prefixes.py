"""The reuse that a perfect prefix cache would reach on a stream of requests, and one with few places to resume.

Pure arithmetic over token sequences: nothing here is a cache, and nothing is ever evicted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Shown = Callable[[int], Sequence[int]]
"""What the layers have seen after a request of which so many tokens were cached: prompt and answer, or less if it was
cancelled."""


class Reuse(NamedTuple):
    """Of a prompt, in tokens: the prefix that an earlier sequence has too, and how much of it need not be computed."""

    matched: int
    cached: int


class Prefixes:
    """The tree of all sequences so far, token by token.

    Its length is the number of distinct tokens: those that come after equal prefixes count once.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._next)

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes after each token of the longest prefix that is there."""
        node, path = 0, []
        for token in tokens:
            following = self._next.get((node, token))
            if following is None:
                break
            node = following
            path.append(node)
        return path

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Puts a sequence in and returns its nodes."""
        node, path = 0, []
        for token in tokens:
            node = self._next.setdefault((node, token), len(self._next) + 1)
            path.append(node)
        return path


class Anywhere:
    """Resumes at every token: what keys and values allow when nothing is evicted."""

    def __init__(self) -> None:
        self._prefixes = Prefixes()

    def serve(self, prompt: Sequence[int], shown: Shown) -> Reuse:
        """One request."""
        matched = len(self._prefixes.path(prompt))
        cached = min(matched, len(prompt) - 1)
        self._prefixes.add(shown(cached))
        return Reuse(matched, cached)


class FixedPoints:
    """Resumes only at multiples of `every` tokens, `before_end` tokens before the end of a prompt, at the end of a
    sequence, and, with `branches`, where an earlier request left the known sequences and had to recompute the place.

    The points are those of Ollama's runner, where a layer has only its last state.
    """

    def __init__(self, every: int = 8192, before_end: int = 4, *, branches: bool = False) -> None:
        self._every = every
        self._before_end = before_end
        self._branches = branches
        self._prefixes = Prefixes()
        self._points: set[int] = set()  # nodes

    def serve(self, prompt: Sequence[int], shown: Shown) -> Reuse:
        """One request."""
        path = self._prefixes.path(prompt)
        matched = len(path)
        limit = min(matched, len(prompt) - 1)
        cached = next((length for length in range(limit, 0, -1) if path[length - 1] in self._points), 0)
        nodes = self._prefixes.add(shown(cached))
        lengths = [*range(self._every, len(prompt), self._every), len(prompt) - self._before_end, len(nodes)]
        if self._branches:
            lengths.append(matched)
        self._points.update(nodes[length - 1] for length in lengths if cached < length <= len(nodes))
        return Reuse(matched, cached)
