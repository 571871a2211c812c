import mlx.core as mx

from runner.sampling.random_numbers import Uniforms, random_keys
from tests.unit.sampling.reference import splitmix64

_LAST = (1 << 64) - 1


def test_keys_are_those_of_mlx() -> None:
    assert random_keys([1234], [0], 1).tolist() == [[[3138188827, 790109403]]]
    seeds, draws = [5678, 0, 1 << 63, _LAST, _LAST + 43], [10, 0, 7, 1 << 40, 3]
    expected = [
        [mx.random.key(splitmix64(seed, number)).tolist() for number in range(draw, draw + 6)]
        for seed, draw in zip(seeds, draws, strict=True)
    ]
    assert random_keys(seeds, draws, 6).tolist() == expected


def test_every_number_comes_from_the_key_of_its_draw() -> None:
    uniforms = Uniforms([7, _LAST], [0, 40])
    assert uniforms.draws == [0, 40]
    taken = []
    for count in range(1, 151):  # more than two blocks
        taken.append(uniforms.take_next())
        assert uniforms.draws == [count, 40 + count], "numbers made ahead do not count"
    expected = [
        [mx.random.uniform(shape=(1,), key=mx.random.key(splitmix64(seed, draw))).tolist() for seed, draw in pair]
        for pair in [((7, draw), (_LAST, 40 + draw)) for draw in range(150)]
    ]
    assert [number.tolist() for number in taken] == expected
