"""A session as drafters see it, and a clock for their looks, for tests without a model."""

from collections.abc import Sequence


class SeenSession:
    """The recorded tokens, and a path of the cache that goes on from them."""

    def __init__(self, recorded: Sequence[int], path: Sequence[int] = ()) -> None:
        self.recorded = [*recorded]
        self.path = [*path]

    def continuation(self, most: int) -> list[int]:
        return self.path[:most]


class LookClock:
    """A clock by which each look for drafts takes `look_s`."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.look_s = look_s
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self.look_s
        return self._now_s
