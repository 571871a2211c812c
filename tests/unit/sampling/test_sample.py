from math import inf, nan

import mlx.core as mx

from runner.sampling.sample import Choice, Details, LogprobsRow, SampledTokens


def sample(first: int, tops: list[int | None], widest: int = 3) -> SampledTokens:
    """Returns rows that drew `first` and the following ids, each with so many alternatives."""
    rows = range(first, first + len(tops))
    asking = [row for row, top in zip(rows, tops, strict=True) if top is not None]
    details = Details(mx.array([-float(row) for row in asking]))
    if widest:
        ids = mx.array([[100 * row + rank for rank in range(widest)] for row in asking], dtype=mx.uint32)
        details = Details(details.logprob, ids, -ids.astype(mx.float32))
    wishes = [
        None if top is None else LogprobsRow(details, asking.index(row), top)
        for row, top in zip(rows, tops, strict=True)
    ]
    return SampledTokens(mx.array([*rows], dtype=mx.uint32), wishes if asking else ())


def choice(row: int, top: int | None) -> Choice:
    if top is None:
        return Choice(row)
    return Choice(row, -float(row), [(100 * row + rank, -float(100 * row + rank)) for rank in range(top)])


def test_each_row_reads_what_it_asked_for() -> None:
    tops = [None, 0, 3, None, 1]
    assert sample(0, tops).read() == [choice(row, top) for row, top in enumerate(tops)]
    assert sample(5, [0, 0], widest=0).read() == [choice(5, 0), choice(6, 0)]
    assert sample(5, [None]).read() == [choice(5, None)]


def test_samples_of_any_wishes_are_joined() -> None:
    joined = SampledTokens.joined(
        [sample(0, [None, 2]), sample(2, [None]), sample(3, [5, 1], widest=5), sample(8, [0], 0)]
    )
    tops = {0: None, 1: 2, 2: None, 3: 5, 4: 1, 8: 0}
    assert joined.token.tolist() == [*tops]
    assert joined.read() == [choice(row, top) for row, top in tops.items()]
    assert joined.take([4, 1, 5]).read() == [choice(4, 1), choice(1, 2), choice(8, 0)]


def test_one_sample_joined_is_itself() -> None:
    alone = sample(0, [1])
    assert SampledTokens.joined([alone]) is alone


def test_all_arrays_are_named_once_however_many_rows_share_them() -> None:
    shared = sample(0, [2, None, 1])
    assert len(shared.arrays()) == 4
    again = SampledTokens.joined([shared.take([0]), shared.take([1, 2])])
    assert [id(array) for array in again.arrays()[1:]] == [id(array) for array in shared.arrays()[1:]]
    assert len(shared.take([1]).arrays()) == 1


ROWS = [
    ([0.0, 0.0, 0.0], True),
    ([nan, 0.0, 0.0], False),
    ([inf, 0.0, 0.0], False),
    ([-inf, 0.0, -inf], True),  # closed tokens
    ([nan, 0.0, -inf], False),
    ([inf, 0.0, -inf], False),
    ([-inf, -inf, -inf], False),
    ([-3e38, 1.0, -3e38], True),  # their sum is infinite
    ([0.0, 3e38, 0.0], True),
]
"""Logits, and whether they are numbers. The token is 1: where NaN is passed over it is the most probable one."""


def test_a_row_says_whether_it_is_from_numbers_wherever_it_goes() -> None:
    logits, token = mx.array([row for row, _ in ROWS]), mx.ones(len(ROWS), mx.uint32)
    drawn = SampledTokens(token, (), logits, logits)
    right = [each for _, each in ROWS]
    assert [choice.from_numbers for choice in drawn.read()] == right
    order = [3, 1, 7, 6, 0]
    assert [choice.from_numbers for choice in drawn.take(order).read()] == [right[row] for row in order]
    known = SampledTokens(mx.zeros(2, mx.uint32))
    joined = SampledTokens.joined([known, drawn.take([2]), drawn])
    assert [choice.from_numbers for choice in joined.read()] == [True, True, False, *right]
