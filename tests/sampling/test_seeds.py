import mlx.core as mx

from runner.sampling.seeds import Uniforms, random_keys, splitmix64


def test_splitmix_vectors_of_the_protocol() -> None:
    assert [splitmix64(42, draw) for draw in range(3)] == [0xBDD732262FEB6E95, 0x28EFE333B266F103, 0x47526757130F9F52]
    assert [splitmix64(1234, draw) for draw in range(2)] == [0xBB0CF61B2F181CDB, 0x97C7A1364DF06524]
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF


def test_splitmix_wraps_at_64_bits() -> None:
    assert splitmix64((1 << 64) + 42, 0) == splitmix64(42, 0)


def test_keys_are_those_of_mlx() -> None:
    assert random_keys(1234, 0, 1).tolist() == [[3138188827, 790109403]]
    keys = random_keys(5678, 10, 6)
    assert keys.tolist() == [mx.random.key(splitmix64(5678, draw)).tolist() for draw in range(10, 16)]


def test_every_number_comes_from_the_key_of_its_draw() -> None:
    uniforms = Uniforms(7)
    taken = [uniforms.take() for _ in range(150)]  # more than two blocks
    expected = [mx.random.uniform(shape=(1, 1), key=mx.random.key(splitmix64(7, draw))) for draw in range(150)]
    assert [number.tolist() for number in taken] == [number.tolist() for number in expected]
