"""The detokenizer: stop strings, text that is held back, entries. The oracle sees the whole text at once."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.tokenizer.detokenizer import Detokenizer, StopStrings, TextPiece, Utf8Stream


class Run(NamedTuple):
    """The output of one generation: a piece or None for each token, and for the end."""

    pushed: list[TextPiece[int] | None]
    last: TextPiece[int] | None
    stopped: bool

    @property
    def pieces(self) -> list[TextPiece[int]]:
        return [piece for piece in [*self.pushed, self.last] if piece is not None]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def entries(self) -> list[int]:
        return [entry for piece in self.pieces for entry in piece.entries]


def run(chunks: list[bytes], stop: list[str]) -> Run:
    """Pushes tokens until the text stops, as the engine does. Token i is the i-th chunk; entries are the ids."""
    stream: Detokenizer[int] = Detokenizer(chunks.__getitem__, StopStrings(stop))
    pushed = []
    for token_id in range(len(chunks)):
        pushed.append(stream.push(token_id, token_id))
        if stream.stopped:
            break
    return Run(pushed, stream.finish(), stream.stopped)


def texts(*chunks: str) -> list[bytes]:
    return [chunk.encode() for chunk in chunks]


def cut(text: str, stop: list[str]) -> int | None:
    """Returns the place at which the earliest stop string begins."""
    return min((place for word in stop if word and (place := text.find(word)) >= 0), default=None)


def places_of(chunks: list[bytes]) -> tuple[str, list[tuple[int, int] | None]]:
    """Returns the text that the chunks complete, and the place of each token's characters in it; None if it completes
    nothing up to the end."""
    stream, text, spans = Utf8Stream(), "", [(0, 0)] * len(chunks)
    waiting: list[int] = []
    for index, chunk in enumerate(chunks):
        waiting.append(index)
        if more := stream.feed(chunk):
            for token in waiting:
                spans[token] = (len(text), len(text) + len(more))
            text, waiting = text + more, []
    return text, [None if i in waiting else span for i, span in enumerate(spans)]


alphabet = st.sampled_from("aab é😀")
words = st.text(alphabet, max_size=5)
stop_lists = st.lists(words, max_size=4)


@st.composite
def chunk_lists(draw: st.DrawFn, broken: bool = False) -> list[bytes]:
    """Generates a random text cut at random bytes, with empty tokens; `broken` texts may hold any bytes."""
    data = draw(st.text(alphabet, max_size=24)).encode()
    if broken:
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(st.binary(max_size=3)) + data[place:]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]


@given(chunk_lists(), stop_lists)
@example(texts("x", "abc", "d", "e"), ["abcd", "bc"])
@example(texts("x", "abc", "e", "d"), ["abcd", "bc"])
@example(texts("abc"), ["abcd", "bc"])
@example(texts("abab", "ac"), ["abac"])
@example(texts("aaab"), ["b", "ab", "aab"])
@example(texts("abcx"), ["abcde", "b", "c"])
def test_delivered_is_the_text_up_to_the_earliest_stop_string(chunks: list[bytes], stop: list[str]) -> None:
    text = b"".join(chunks).decode()
    end = cut(text, stop)
    result = run(chunks, stop)
    assert result.text == text[:end]
    assert result.stopped is (end is not None)


@given(chunk_lists(broken=True), stop_lists)
def test_held_back_is_only_what_may_become_a_stop_string(chunks: list[bytes], stop: list[str]) -> None:
    result = run(chunks, stop)
    longest = max(map(len, stop), default=0)
    decoder, decoded, delivered = Utf8Stream(), "", ""
    for chunk, piece in zip(chunks, result.pushed, strict=False):
        decoded += decoder.feed(chunk)
        delivered += piece.text if piece else ""
        assert decoded.startswith(delivered)
        assert len(decoded) - len(delivered) <= max(longest - 1, 0) or len(delivered) == cut(decoded, stop)
        held = decoded[len(delivered) :]
        assert not held or any(word.startswith(held) for word in stop) or len(delivered) == cut(decoded, stop)


@given(chunk_lists(broken=True), stop_lists, st.integers(0, 12))
@example([b"ab", b"\xc3", b"\xa9", b"c"], ["\u00e9"], 2)
def test_a_token_that_completes_a_stop_string_is_found_ahead(chunks: list[bytes], stop: list[str], at: int) -> None:
    """From any place, and without a trace."""
    stream: Detokenizer[int] = Detokenizer(chunks.__getitem__, StopStrings(stop))
    pushed = []
    for token_id in range(len(chunks)):
        ahead = stream.completes_stop(token_id) if token_id == at else None
        pushed.append(stream.push(token_id, token_id))
        assert ahead in (None, stream.stopped)
        if stream.stopped:
            break
    assert Run(pushed, stream.finish(), stream.stopped) == run(chunks, stop)


@given(chunk_lists(broken=True), stop_lists)
@example([b"a", b"\xf0\x9f"], [])
@example([b"a", b"\xf0\x9f"], ["aa"])
@example([b"ab", b"\xf0\x9f"], ["abc", "b"])
def test_each_entry_comes_once_with_the_last_character_of_its_token(chunks: list[bytes], stop: list[str]) -> None:
    result = run(chunks, stop)
    text, places = places_of(chunks)
    end = cut(text, stop)
    due = [i for i, span in enumerate(places) if end is None or (span and span[0] < end)]
    position = 0
    for piece in result.pieces:
        position += len(piece.text)
        last = piece is result.pieces[-1]
        now = [i for i in due if (span := places[i]) and (span[1] <= position or (last and end is not None))]
        if last and end is None:
            now += [i for i in due if places[i] is None]
        due = [i for i in due if i not in now]
        assert piece.entries == now
    assert not due, "every token has its entry, but for those behind a stop string"


@pytest.mark.parametrize(
    ("chunks", "stop", "pieces"),
    [
        (["Hello", "\n", "\n", "User"], ["\n\nUser"], [("Hello", [0])]),
        (["Hello", "\n", "\n", "Use"], ["\n\nUser"], [("Hello", [0]), ("\n\nUse", [1, 2, 3])]),
        (["a", "\n", "b"], ["\n\n"], [("a", [0]), ("\nb", [1, 2])]),
        (["one\ntwo", "three"], ["\n"], [("one", [0])]),
        (["\n"], ["\n"], []),
        (["ab", "X", "c"], ["bX"], [("a", []), ("", [0])]),
        (["x<", "|end", "|>y"], ["<|end|>"], [("x", []), ("", [0])]),
    ],
)
def test_a_stop_string_across_tokens(chunks: list[str], stop: list[str], pieces: list[tuple[str, list[int]]]) -> None:
    assert run(texts(*chunks), stop).pieces == pieces


class Counted(list[int]):
    """A table that counts its look-ups."""

    reads = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # no slices here
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("text", ["a" * 5000, "ab" * 2500, ("a" * 99 + "c") * 50])
def test_the_work_is_one_step_per_character_whatever_the_stop_strings(text: str) -> None:
    stops = StopStrings(["a" * 100 + "b", *("ab" * length for length in range(200, 260)), "a" * 1000])
    fallback = stops._fallback = Counted(stops._fallback)
    state = 0
    for character in text:
        state = stops.step(state, character)
    assert fallback.reads <= len(text)
