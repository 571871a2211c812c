"""Texts that wait for their embeddings: which are computed together, who waits for whom, what ends with a client."""

from collections.abc import Iterator, Sequence
from math import inf, nan

import mlx.core as mx
import pytest

from runner.embeddings.embedder import EmbeddingSizes, EncoderPiece, TextEmbedder, TextToEmbed, choose
from runner.errors import ComputeError, RequestError

LAYERS, CHUNK = 4, 10
MOST = 8 * CHUNK
"""Tokens of a forward over several texts."""
SIZES = EmbeddingSizes(2, (), frozenset(), token_bytes=10, least_bytes=100)


class Encoder:
    """Makes of a text its length and its first token. A token of 99 is one that it cannot compute."""

    layers = range(LAYERS)

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        """The lengths of the texts of each."""
        self.pieces: list[int] = []
        """For each piece the forward that it is of."""
        self.most_padded = 0

    def encode(self, inputs: mx.array, lengths: Sequence[int], media: Sequence[object] = ()) -> Iterator[EncoderPiece]:
        del media
        self.forwards.append([*lengths])
        self.most_padded = max(self.most_padded, inputs.size)
        number = len(self.forwards) - 1
        for _ in range(LAYERS):
            self.pieces.append(number)
            yield EncoderPiece([inputs], inputs.size)
        if mx.any(inputs == 99):
            raise ValueError("99")
        yield EncoderPiece([mx.stack([mx.array([*lengths]), inputs[:, 0]], axis=1).astype(mx.float32)], 0.0)


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def embedder(encoder: Encoder) -> TextEmbedder:
    return TextEmbedder(encoder, SIZES, CHUNK, room_bytes=1000)


def ask(embedder: TextEmbedder, *lengths: int, first: int = 5) -> list[TextToEmbed]:
    texts = [TextToEmbed([first + number] * length) for number, length in enumerate(lengths)]
    for text in texts:
        embedder.add_text(text)
    return texts


def finish(embedder: TextEmbedder) -> int:
    """Returns how many slices it took."""
    slices = 0
    while embedder.pending():
        embedder.advance()
        slices += 1
        assert slices < 1000
    return slices


def test_texts_that_wait_together_are_computed_together(embedder: TextEmbedder, encoder: Encoder) -> None:
    texts = ask(embedder, 4, 3, 5, 4)
    assert embedder.counts().waiting == 4
    finish(embedder)
    assert encoder.forwards == [[4, 3, 5, 4]]
    assert [text.found.result() for text in texts] == [[4, 5], [3, 6], [5, 7], [4, 8]]
    counts = embedder.counts()
    assert (counts.forwards, counts.texts, counts.tokens, counts.padding, counts.waiting) == (1, 4, 16, 4, 0)


@pytest.mark.parametrize(
    ("lengths", "most", "chosen"),
    [
        ([5], 80, [0]),
        ([500], 80, [0]),
        ([10] * 20, 80, [*range(8)]),
        ([10, 1, 1, 1], 80, [0, 1]),
        ([10, 1, 10, 1, 9], 80, [0, 1, 2, 3, 4]),
        ([1, 10, 1, 10, 1], 80, [0, 2, 4]),
        ([10, 20, 11, 40], 80, [0, 1, 2]),
        ([10, 100, 10], 80, [0, 2]),
        ([1] * 100, 80, [*range(80)]),
    ],
)
def test_near_lengths_share_a_forward_with_the_text_that_waits_longest(
    lengths: list[int], most: int, chosen: list[int]
) -> None:
    assert choose(lengths, most) == chosen
    padded = max(lengths[index] for index in chosen) * len(chosen)
    assert len(chosen) == 1 or padded <= min(most, 2 * sum(lengths[index] for index in chosen))


def test_a_forward_is_bounded_and_the_rest_goes_into_the_next(embedder: TextEmbedder, encoder: Encoder) -> None:
    texts = ask(embedder, *[8] * 25)
    finish(embedder)
    assert [len(each) for each in encoder.forwards] == [10, 10, 5]
    assert encoder.most_padded == MOST
    assert all(text.found.result()[0] == 8 for text in texts)


def test_a_slice_is_as_much_work_as_one_of_a_prompt(embedder: TextEmbedder) -> None:
    for tokens, slices in ((CHUNK, 2), (4 * CHUNK, LAYERS + 1)):  # the last piece only gathers
        ask(embedder, tokens)
        assert finish(embedder) == slices


def test_a_short_text_takes_turns_with_a_long_one(embedder: TextEmbedder, encoder: Encoder) -> None:
    long = ask(embedder, MOST + 1)
    embedder.advance()
    short = ask(embedder, 5, 5)
    for _ in range(4):
        embedder.advance()
    assert all(text.found.done() for text in short)
    assert not long[0].found.done()
    for _ in range(100):  # nor do short ones without end hold it up
        ask(embedder, 5)
        embedder.advance()
        if long[0].found.done():
            break
    assert long[0].found.result()[0] == MOST + 1
    assert encoder.pieces.count(0) == LAYERS


def test_long_texts_are_computed_one_by_one(embedder: TextEmbedder, encoder: Encoder) -> None:
    ask(embedder, MOST + 1, MOST + 1)
    finish(embedder)
    assert encoder.forwards == [[MOST + 1], [MOST + 1]]
    assert encoder.pieces == [0] * LAYERS + [1] * LAYERS


def test_nothing_is_computed_for_a_client_that_has_left(embedder: TextEmbedder, encoder: Encoder) -> None:
    waiting, stays = ask(embedder, 5, 5)
    assert waiting.found.cancel()
    finish(embedder)
    assert encoder.forwards == [[5]]
    assert stays.found.done()
    running, other = ask(embedder, 8 * CHUNK // 2, 8 * CHUNK // 2)
    embedder.advance()
    done = len(encoder.pieces)
    assert running.found.cancel()
    embedder.advance()
    assert len(encoder.pieces) == done + 1, "another client waits for the same forward"
    assert other.found.cancel()
    assert finish(embedder) == 1
    assert len(encoder.pieces) == done + 1
    assert embedder.counts().waiting == 0


def test_an_error_ends_the_texts_of_its_forward_alone(embedder: TextEmbedder) -> None:
    (bad,) = ask(embedder, MOST + 1, first=99)
    (good,) = ask(embedder, 5)
    finish(embedder)
    assert good.found.result() == [5, 5]
    with pytest.raises(RequestError, match="ValueError: 99") as raised:
        bad.found.result()
    assert raised.value.status == 500


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_an_embedding_that_is_not_of_numbers_ends_its_text_alone(
    value: float, embedder: TextEmbedder, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = encoder.encode

    def encode(inputs: mx.array, lengths: Sequence[int], media: Sequence[object] = ()) -> Iterator[EncoderPiece]:
        *pieces, last = plain(inputs, lengths, media)
        last.arrays[0][1, 0] = value
        return iter([*pieces, last])

    monkeypatch.setattr(encoder, "encode", encode)
    before, bad, after = ask(embedder, 4, 3, 5)
    finish(embedder)
    assert [before.found.result(), after.found.result()] == [[4, 5], [5, 7]]
    with pytest.raises(RequestError, match=r"^the model computes NaN or infinity in place of numbers: ") as raised:
        bad.found.result()
    assert raised.value.status == 500


def test_a_text_that_memory_cannot_hold_is_refused(embedder: TextEmbedder) -> None:
    assert embedder.refusal(90) == ""
    assert embedder.refusal(91).startswith("embedding request would allocate 1010 bytes (budget 1000); reduce input")


def test_a_model_that_computes_nothing_ends_the_start(
    embedder: TextEmbedder, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder.warm_up(TextToEmbed([0, 0]))
    assert encoder.forwards == [[2]]
    monkeypatch.setattr(encoder, "encode", lambda *_: 1 / 0)
    with pytest.raises(ComputeError, match="the model cannot compute: ZeroDivisionError"):
        embedder.warm_up(TextToEmbed([0, 0]))
