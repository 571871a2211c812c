"""Towers compute what mlx-vlm computes with the same weights (recorded by `record.py`), in pieces of any size."""

from typing import cast

import mlx.core as mx
import pytest

from runner.media.towers.tower import Grid, attend_in_pieces, in_pieces
from tests.model.media.towers.cases import CASES, NEMOTRON, QWEN, RECORDED, Case, encoded, features, made, peak_bytes
from tests.model.media.towers.gemma_cases import distance

ODD = tuple(case for case in CASES if case.name.endswith("-odd"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_features_are_mlx_vlms(case: Case) -> None:
    recorded = cast("dict[str, mx.array]", mx.load(str(RECORDED)))
    assert distance(features(made(case), case), recorded[case.name]) <= 1e-5


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_pieces_change_nothing_and_are_no_larger_than_the_bound(case: Case) -> None:
    tower = made(case)
    whole = list(encoded(tower, case))
    assert len(whole) == 1 + 2 + 1  # after the patches, after every block, and the features
    for piece_bytes in (1, 20_000):
        tower.piece_bytes = piece_bytes
        steps = list(encoded(tower, case))
        assert distance(steps[-1], whole[-1]) <= 2e-6  # BLAS adds up single rows in another order
        assert len(steps) > 20
        assert max(step.nbytes for step in steps) <= max(piece_bytes, (case.grid.patches + 4) * 64 * 4)


@pytest.mark.parametrize(("count", "keys", "piece_bytes"), [(50, 50, 1), (50, 50, 3 * 4 * 50 * 4), (7, 30, 1 << 20)])
def test_attention_in_blocks_is_attention(count: int, keys: int, piece_bytes: int) -> None:
    heads, width, batch = 4, 16, 1
    queries, key, value = (
        mx.random.normal((batch, heads, rows, width), key=mx.random.key(rows + index))
        for index, rows in enumerate((count, keys, keys))
    )
    steps = attend_in_pieces(queries, key, value, 0.25, piece_bytes)
    seen = 0
    while True:
        try:
            mx.eval(next(steps))
            seen += 1
        except StopIteration as done:
            result = done.value
            break
    rows = max(1, piece_bytes // (heads * keys * 4))
    assert seen == -(-count // rows) - 1
    assert distance(result, mx.fast.scaled_dot_product_attention(queries, key, value, scale=0.25)) <= 1e-6


def test_a_gpu_gets_heads_of_a_width_that_its_kernels_know(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in QWEN if case.name.endswith("heads-of-72"))
    widths: list[int] = []
    genuine = mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        widths.append(queries.shape[-1])
        return genuine(queries, keys, values, scale=scale)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    plain = features(made(case), case)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert distance(features(made(case), case), plain) <= 1e-6
    assert widths == [72, 72, 80, 80]


def test_pieces_cover_every_row_once() -> None:
    for count, piece_bytes, expected in ((7, 30, [(0, 3), (3, 6), (6, 7)]), (2, 1, [(0, 1), (1, 2)])):
        found: list[tuple[int, int]] = []

        def noted(rows: slice, found: list[tuple[int, int]] = found) -> mx.array:
            found.append((rows.start, rows.stop))
            return mx.arange(rows.start, rows.stop)

        steps = in_pieces(noted, count, 10, piece_bytes)
        parts = len([*steps])
        assert (found, parts) == (expected, len(expected) - 1)


@pytest.mark.parametrize("case", [QWEN[3], NEMOTRON[4]], ids=lambda case: case.name)
@pytest.mark.parametrize(("side", "piece_bytes"), [(24, 1 << 30), (32, 1 << 18)])
def test_the_estimate_of_memory_holds(case: Case, side: int, piece_bytes: int) -> None:
    tower, case = made(case), case._replace(grid=Grid(side, side))
    tower.piece_bytes = piece_bytes
    mx.eval(patches := case.patches)

    def encode() -> None:
        for step in tower.encode(patches, case.grid):
            mx.eval(step)
            del step

    measured = peak_bytes(tower, encode)
    assert measured <= tower.encode_bytes(case.grid) <= 3 * measured
