"""The index of a text against a search of all of it, and the bounds of its steps and memory."""

import random
from array import array
from collections.abc import Callable, Sequence

import pytest

from runner.drafts import text
from runner.drafts import text as chain
from runner.drafts.text import MOST_MATCH, IndexedText, PlaceChain, TextMatch

Make = Callable[[random.Random, int], list[int]]


def few(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(3) for _ in range(size)]


def many(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(size)]


def copies(rng: random.Random, size: int) -> list[int]:
    """Pieces of what came before, with a new token or a picture in between."""
    tokens = few(rng, 40)
    while len(tokens) < size:
        start = rng.randrange(len(tokens))
        tokens += [*tokens[start : start + rng.randrange(60)], rng.choice([-7, rng.randrange(9)])]
    return tokens[:size]


def periodic(rng: random.Random, size: int) -> list[int]:
    period = rng.randrange(1, 9)
    return [index % period for index in range(size)]


everything = pytest.mark.parametrize("make", [few, many, copies, periodic])


@pytest.fixture
def _unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_MOST_PLACES", 1 << 30)
    monkeypatch.setattr(chain, "_MOST_STEPS", 1 << 30)


def searched(ids: Sequence[int], ending: Sequence[int], least: int) -> TextMatch | None:
    """Returns what `find` should, by looking everywhere."""
    found = [(common(ids[:place], ending), place) for place in range(len(ids) - 1, 0, -1) if ids[place] >= 0]
    best = max((match for match, _ in found), default=0)
    return TextMatch(best, [place for match, place in found if match == best]) if best >= least else None


def common(ids: Sequence[int], ending: Sequence[int]) -> int:
    match = 0
    for ours, theirs in zip(reversed(ids), reversed(ending[-MOST_MATCH:]), strict=False):
        if ours != theirs or ours < 0:
            break
        match += 1
    return match


def indexed(tokens: Sequence[int], widths: Sequence[int] = (2, 8), piece: int = 1 << 30) -> IndexedText:
    whole = IndexedText(widths, list(tokens))
    while not whole.index(piece):
        pass
    return whole


@everything
@pytest.mark.usefixtures("_unbounded")
def test_the_index_finds_what_a_search_of_everything_finds(make: Make) -> None:
    rng = random.Random(1)
    for _ in range(60):
        tokens = make(rng, rng.randrange(1, 300))
        widths = rng.choice([(2, 8), (2, 4), (4, 16), (3,)])
        whole = indexed(tokens, widths, rng.choice([1, 7, 1000]))
        assert whole.find(whole.ending()) == searched(tokens, tokens, widths[0])
        other = [*rng.choices(tokens, k=3), *tokens[10:20]]
        assert whole.find(positive(other)) == searched(tokens, other, widths[0])


def positive(tokens: Sequence[int]) -> list[int]:
    whole = IndexedText((2,), list(tokens))
    return whole.ending()


@everything
@pytest.mark.usefixtures("_unbounded")
def test_to_follow_a_match_is_to_find_it_again(make: Make) -> None:
    rng = random.Random(2)
    tokens, whole = make(rng, 50), IndexedText((2, 8), [])
    whole.append(tokens)
    whole.index(1000)
    found = whole.find(whole.ending())
    for token in [abs(token) for token in make(rng, 300)]:
        whole.append([token])
        whole.index(1)
        tokens.append(token)
        again = whole.find(whole.ending())
        if found:
            followed = whole.follow(found, token)
            if followed and again:
                assert followed.match == again.match
                assert followed == again or (followed.match == MOST_MATCH and {*followed.places} < {*again.places})
            else:
                assert not followed
                assert not again or again.match <= found.match
        found = again


@everything
def test_bounded_searches_find_true_matches(make: Make) -> None:
    rng = random.Random(3)
    for _ in range(60):
        tokens = make(rng, rng.randrange(1, 500))
        whole = indexed(tokens)
        found = whole.find(whole.ending())
        best = searched(tokens, tokens, 2)
        assert bool(found) == bool(best)
        if found and best:
            assert found.match <= best.match
            assert all(common(tokens[:place], tokens) == found.match for place in found.places)
            assert found.places == sorted(set(found.places), reverse=True) or found.match >= 8
            if found.match == best.match < 8:
                assert found.places == best.places[: len(found.places)], "the newest ones"


class Counted(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("make", [few, copies, periodic, lambda _, size: [0] * size])
def test_a_search_takes_a_bounded_number_of_steps(make: Make) -> None:
    for size in (1_000, 20_000):
        ids = Counted(make(random.Random(4), size))
        whole = IndexedText((2, 8), ids)
        while not whole.index(4096):
            pass
        ids.reads = 0
        found = whole.find(whole.ending())
        assert found
        whole.following(found.places, 15)
        assert ids.reads < 2 * 8 * (MOST_MATCH + 2) + 2 * 32 + 8 * 15


def nbytes_of(text: IndexedText) -> int:
    """The memory of the ids, without that of Python's integers, and of the index."""
    return text._ids.__sizeof__() + sum(each._newest.__sizeof__() + each._older.__sizeof__() for each in text._chains)


@pytest.mark.parametrize("size", [10, 3_000, 40_000])
def test_memory_is_bounded(size: int) -> None:
    whole = IndexedText((4, 16), array("i"))
    for start in range(0, size, 1000):
        whole.append(range(start, min(size, start + 1000)))
        while not whole.index(600):
            pass
    assert nbytes_of(whole) <= 28 * 1.13 * size + 2 * 4 * 1024 + 1000  # arrays grow by an eighth
    assert nbytes_of(whole) >= 12 * size


def test_indexing_goes_on_where_it_was_and_no_piece_is_larger() -> None:
    one = PlaceChain(2)
    ids = Counted(few(random.Random(5), 5_000))
    pieces = 0
    while not one.link(ids, 100):
        pieces += 1
        assert ids.reads <= 2 * 100 + 1
        ids.reads = 0
    assert pieces == 49


def test_a_text_that_outgrows_its_table_is_indexed_anew_in_pieces() -> None:
    whole = indexed(many(random.Random(6), 2_048))
    whole.append(range(60_000, 60_010))
    assert not whole.index(1_000)
    while not whole.index(1_000):
        pass
    assert whole.find([60_000, 60_001]) == TextMatch(2, [2_050])


def test_a_negative_id_matches_nothing_and_is_never_proposed() -> None:
    whole = indexed([1, 2, -5, 3, 4, 1, 2, -5, 3, 4])
    assert whole.ending() == [3, 4]
    assert whole.find(whole.ending()) == TextMatch(2, [5])
    assert whole.following([5], 10) == [1, 2]
    assert indexed([1, 2, -5, 1, 2]).find([1, 2]) is None
    assert indexed([3, -5, 3, -5]).ending() == []


def test_most_places_decide_token_by_token_then_the_newest() -> None:
    whole = indexed([1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 8, 1, 2])
    found = whole.find([1, 2])
    assert found == TextMatch(2, [10, 6, 2])
    assert whole.following(found.places, 2) == [5, 7]
    assert whole.following([10], 3) == [8, 8, 1]


def test_a_text_that_ends_goes_on_as_if_it_repeated_itself() -> None:
    whole = indexed([9, 1, 2, 3, 1, 2])
    found = whole.find(whole.ending())
    assert found == TextMatch(2, [3])
    assert whole.following(found.places, 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert whole.following([3, 3], 8) == [3, 1, 2, 3, 1, 2, 3, 1]
