"""A session as drafters see it, for tests without a model."""

from collections.abc import Sequence


class SeenSession:
    """The recorded tokens, and a path of the cache that goes on from them."""

    def __init__(self, recorded: Sequence[int], path: Sequence[int] = ()) -> None:
        self.recorded = [*recorded]
        self.path = [*path]

    def continuation(self, most: int) -> list[int]:
        return self.path[:most]
