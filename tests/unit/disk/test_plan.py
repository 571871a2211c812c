"""Which segments are found for a prompt, from names alone."""

import pytest

from runner.disk.points import DigestOf, PrefixDigests, Tokens, UnknownMediaError
from runner.disk.segment import STATE, TAIL, Name
from runner.disk.segment_reader import branch, chain, deepest_state, held_at, partial
from runner.disk.store import Index
from tests.unit.disk.made import ROOT, named, points

A = list(range(1000))
B = [*A[:280], *range(5000, 5400)]  # branches off at 280


def names(*spans: tuple[int, int], of: list[int] = A) -> list[Name]:
    return [named(of, start, stop) for start, stop in spans]


def test_a_prompt_is_found_however_it_was_cut() -> None:
    for spans in ([(0, 256), (256, 512), (512, 600)], [(0, 10), (10, 266), (266, 600)]):
        found = chain(Index(names(*spans)), points(A))
        assert [(name.start, name.stop) for name in found.names] == spans
        assert found.stop == 600


def test_another_salt_or_model_finds_nothing() -> None:
    index = Index(names((0, 256)))
    assert chain(index, points(A, "salt")).stop == 0
    assert chain(index, PrefixDigests(b"x" * 32, "", A)).stop == 0
    assert chain(index, points(A[:200])).stop == 0


def test_the_longest_of_several_is_taken_and_what_overlaps_serves() -> None:
    found = chain(Index(names((0, 100), (0, 256), (100, 356))), points(A))
    assert [name.stop for name in found.names] == [256, 356]


def test_a_branch_inside_of_a_segment_is_found() -> None:
    index = Index([*names((0, 256), (256, 300), (300, 500)), *names((280, 500), (500, 600), of=B)])
    prompt = points(B)
    held = chain(index, prompt)
    assert held.stop == 256
    assert [(name.start, name.stop) for name in partial(index, prompt, 256)] == [(256, 300)]
    rest = branch(index, prompt, 256, 280)  # its tokens were compared: the first 24 are those of the prompt
    assert [(name.start, name.stop) for name in rest.names] == [(280, 500), (500, 600)]
    assert chain(index, points(A)).stop == 500


def test_layers_stand_where_all_of_their_states_and_tails_are() -> None:
    entries = names((0, 256), (256, 512))
    held = [named(A, 0, 100, TAIL), named(A, 100, 300, TAIL), named(A, 299, 300, STATE), named(A, 300, 512, TAIL)]
    index = Index([*entries, *held])
    assert deepest_state(index, points(A), 512) == 300
    assert deepest_state(index, points(A), 299) is None
    assert held_at(index, points(A), 300, lambda at: at - 250) == [held[0], held[1], held[2]]
    assert held_at(index, points(A), 300, lambda at: at - 200) == [held[1], held[2]]
    assert deepest_state(Index(entries), points(A), 512) is None


def test_a_place_to_stand_is_found_by_hashing_the_prompt_once() -> None:
    """However many states other conversations have left at other offsets."""

    class Counting(PrefixDigests):
        hashed = 0

        def _spelled(self, tokens: Tokens, digest_of: DigestOf) -> bytes:
            self.hashed += len(tokens)
            return super()._spelled(tokens, digest_of)

    states = [named(B, at - 1, at, STATE) for at in range(300, 680)]
    prompt = Counting(ROOT, "", A)
    assert deepest_state(Index([named(A, 1, 2, STATE), *states]), prompt, 999) == 2
    assert prompt.hashed <= len(A)


def test_what_is_removed_is_found_no_more() -> None:
    every = [*names((0, 256), (0, 100)), named(A, 99, 100, STATE)]
    index = Index(every)
    for name in every:
        index.discard(name)
        index.discard(name)
    assert not index.names
    assert chain(index, points(A)).stop == 0
    assert deepest_state(index, points(A), 999) is None
    index = Index(every)
    index.replace(["about.json", every[0].file])
    assert [*index.names] == [every[0].file]


def test_points_are_those_of_the_tokens_alone() -> None:
    at_once, in_steps, back = points(A), points(A), points(A)
    assert [in_steps.at(at) for at in (0, 3, 256, 700)] == [at_once.at(at) for at in (0, 3, 256, 700)]
    assert [back.at(at) for at in (700, 256, 3, 0)] == [at_once.at(at) for at in (700, 256, 3, 0)]
    assert points([*A[:9], 77]).at(9) == at_once.at(9)
    assert points([*A[:8], 77]).at(9) != at_once.at(9)


def test_a_picture_counts_by_its_digest() -> None:
    digests = {-1: b"a" * 32, -2: b"b" * 32}
    one, same, other = (
        PrefixDigests(ROOT, "", tokens, of)
        for tokens, of in (
            ([5, -1, -1, 6], digests.get),
            ([5, -9, -9, 6], {-9: b"a" * 32}.get),
            ([5, -2, -2, 6], digests.get),
        )
    )
    assert one.at(4) == same.at(4) != other.at(4)
    with pytest.raises(UnknownMediaError):
        PrefixDigests(ROOT, "", [5, -3]).at(2)
