from collections import deque

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from runner.sampling.penalties import Leaving, Window

VOCABULARY = 9


def left(leaving: Leaving | None, row: int) -> int | None:
    """Returns the token that left the window of `row`; None if none did."""
    if leaving is None:
        return None
    assert leaving.ids.shape[1] == 1
    change = leaving.change.tolist()[row][0] if isinstance(leaving.change, mx.array) else leaving.change  # type: ignore[index]  # tolist of any depth
    assert change in (0, -1)
    token = leaving.ids[row, 0].item()
    assert isinstance(token, int)
    assert token < VOCABULARY
    return token if change else None


class Reference:
    """The window of one row, as a list of its tokens."""

    def __init__(self, tokens: list[int], places: int) -> None:
        self.tokens = deque(tokens[-places:])
        self._places = places

    def add(self, token: int) -> int | None:
        self.tokens.append(token)
        if len(self.tokens) <= self._places:
            return None
        oldest = self.tokens.popleft()
        return oldest if 0 <= oldest < VOCABULARY else None


histories = st.lists(st.integers(-1, VOCABULARY), max_size=150)


@given(st.integers(1, 140), st.lists(histories, min_size=1, max_size=4), st.data())
def test_the_leaving_token_does_not_depend_on_other_rows(
    places: int, rows: list[list[int]], data: st.DataObject
) -> None:
    windows = [Window.of_request(row, places, VOCABULARY) for row in rows]
    references = [Reference(row, places) for row in rows]
    for _ in range(data.draw(st.integers(1, 4))):
        shared = Window.joined(windows)
        for _ in range(data.draw(st.integers(0, 90))):
            tokens = [data.draw(st.integers(0, VOCABULARY - 1)) for _ in rows] if len(rows) < 2 else [1, 5, 0, 8]
            leaving = shared.add(mx.array([[token] for token in tokens[: len(rows)]], dtype=mx.uint32))
            for row, (reference, token) in enumerate(zip(references, tokens, strict=False)):
                assert left(leaving, row) == reference.add(token)
        windows = shared.apart()
