"""Prompts with pictures: markers, ids and keys, positions, and names that no two pictures share."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.media.geometry import Geometry, grid
from runner.media.header import PictureHeader
from runner.media.prompt import Marker, MediaNames, MediaPrompt, Picture, split_markers
from runner.media.support import DIGEST_BYTES, digest

SOFT = 62


def picture(rows: int = 2, columns: int = 3, name: int = -1) -> Picture:
    """A picture of these soft tokens."""
    geometry = grid(columns * 32, rows * 32, 16, 2)
    header = PictureHeader("PNG", geometry.width, geometry.height)
    return Picture(data=b"", header=header, geometry=geometry, name=name)


PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 50), max_size=5),
        st.builds(picture, st.integers(1, 5), st.integers(1, 5), st.integers(-9, -1)),
    ),
    max_size=7,
)


def walked(parts: Sequence[Sequence[int] | Picture], more: int) -> list[tuple[int, int, int]]:
    """Time, row and column of every token, and of `more` behind them, token by token."""
    found, counter = [], 0
    for part in (*parts, [0] * more):
        if isinstance(part, Picture):
            for row in range(part.geometry.token_rows):
                found += [(counter, counter + row, counter + column) for column in range(part.geometry.token_columns)]
            counter += max(part.geometry.token_rows, part.geometry.token_columns)
        else:
            found += [(counter + index,) * 3 for index in range(len(part))]
            counter += len(part)
    return found


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("", [""]),
        ("no marker", ["no marker"]),
        ("[img-0]", ["", Marker(0), ""]),
        ("a[img-3]b", ["a", Marker(3), "b"]),
        ("[img-0][img-1]", ["", Marker(0), "", Marker(1), ""]),
        ("[img-007]x", ["", Marker(7), "x"]),
        ("[img-] [img--1] [img-1 ] [img] [IMG-1] img-1]", ["[img-] [img--1] [img-1 ] [img] [IMG-1] img-1]"]),
        ("[[img-1]]", ["[", Marker(1), "]"]),
        ("[img-[img-2]", ["[img-", Marker(2), ""]),
        ("[img-٣]", ["[img-٣]"]),  # a digit, but none of ASCII's
    ],
)
def test_a_prompt_is_split_at_its_markers(prompt: str, wanted: list[str | Marker]) -> None:
    assert list(split_markers(prompt)) == wanted


@given(st.lists(st.one_of(st.integers(0, 99), st.sampled_from(["[img-", "0]", "x", "]", "[", "é", "\n"]))))
def test_texts_and_markers_take_turns_and_nothing_is_lost(pieces: list[int | str]) -> None:
    prompt = "".join(f"[img-{piece}]" if isinstance(piece, int) else piece for piece in pieces)
    parts = list(split_markers(prompt))
    assert "".join(f"[img-{part.id}]" if isinstance(part, Marker) else part for part in parts) == prompt
    assert all(isinstance(part, Marker) == bool(index % 2) for index, part in enumerate(parts))
    assert len(parts) % 2 == 1


@given(PARTS)
def test_keys_differ_from_ids_in_pictures_alone(parts: list[list[int] | Picture]) -> None:
    prompt = MediaPrompt(parts, SOFT)
    assert len(prompt.ids) == len(prompt.keys)
    inside = [
        next((span for span in prompt.spans if span.start <= at < span.stop), None) for at in range(len(prompt.ids))
    ]
    for token, key, span in zip(prompt.ids, prompt.keys, inside, strict=True):
        assert (token, key) == (SOFT, span.item.name) if span else token == key >= 0
    assert [span.item for span in prompt.spans] == [part for part in parts if isinstance(part, Picture)]
    assert all(span.stop - span.start == span.item.tokens for span in prompt.spans)
    assert all(before.stop <= after.start for before, after in pairwise(prompt.spans))


@given(PARTS, st.integers(0, 6), st.data())
def test_positions_are_those_of_a_walk(parts: list[list[int] | Picture], more: int, data: st.DataObject) -> None:
    prompt, wanted = MediaPrompt(parts, SOFT, mrope=True), walked(parts, more)
    if not prompt.spans:
        return
    start = data.draw(st.integers(0, len(wanted)))
    stop = data.draw(st.integers(start, len(wanted)))
    found = prompt.positions(start, stop)
    if found is None:
        assert wanted[start:stop] == [(at,) * 3 for at in range(start, stop)]
    else:
        assert [*zip(*found, strict=True)] == wanted[start:stop]


@given(PARTS)
def test_the_shift_leads_from_offsets_to_positions_behind_the_prompt(parts: list[list[int] | Picture]) -> None:
    prompt = MediaPrompt(parts, SOFT, mrope=True)
    for at, place in enumerate(walked(parts, 3)[len(prompt.ids) :], len(prompt.ids)):
        assert place == (at + prompt.shift,) * 3
    largest = max((max(place) for place in walked(parts, 0)), default=-1)
    assert prompt.shift == largest + 1 - len(prompt.ids) <= 0


def test_names_are_negative_and_those_of_equal_digests_equal() -> None:
    names = MediaNames()
    found = [names.name_of(bytes([value])) for value in (1, 2, 1, 3, 2)]
    assert found == [-1, -2, -1, -3, -2]


@given(st.lists(st.integers(0, 12)), st.integers(1, 5))
def test_a_name_is_never_given_to_another_digest(asked: list[int], most: int) -> None:
    names = MediaNames(most)
    owners: dict[int, int] = {}
    latest: list[int] = []
    for value in asked:
        name = names.name_of(bytes([value]))
        assert owners.setdefault(name, value) == value
        if value in latest[-most:]:
            assert name == next(known for known in sorted(owners) if owners[known] == value)  # the last one given
        latest = [*(each for each in latest if each != value), value]
    assert len(names._names) <= most


def test_threads_that_ask_at_once_get_one_name_for_one_digest() -> None:
    names = MediaNames()
    found: list[list[int]] = [[] for _ in range(4)]

    def ask(which: int) -> None:
        found[which] += [names.name_of(value.to_bytes(4)) for value in range(2000)]

    threads = [Thread(target=ask, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(names_of == found[0] for names_of in found)
    assert len(set(found[0])) == 2000


def folded(data: bytes, state: int = 0xCBF29CE484222325) -> int:
    """FNV-1a over the bytes."""
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def test_pictures_that_ollama_takes_for_each_other_have_names_of_their_own() -> None:
    """Ollama's key is FNV-1a, folded to 31 bits."""
    alike = b"red picture\x0b\xbf\x7f>\xbbN\xb5U", b"blue picture\xd0\xee\x99\xcd\x88\xdcC\x14"
    assert len({(folded(data) >> 32 ^ folded(data)) & 0x7FFFFFFF for data in alike}) == 1
    names, geometry = MediaNames(), grid(256, 256, 16, 2)
    assert [names.name_of(digest("image", "qwen3_5", geometry, data)) for data in alike] == [-1, -2]


GEOMETRY = grid(64, 32, 16, 2)


def test_a_digest_depends_on_kind_family_geometry_and_data() -> None:
    other = [GEOMETRY._replace(**{field: getattr(GEOMETRY, field) + 1}) for field in Geometry._fields]
    names = [
        digest("image", "qwen3_5", GEOMETRY, b"data"),
        digest("audio", "qwen3_5", GEOMETRY, b"data"),
        digest("image", "gemma4", GEOMETRY, b"data"),
        *(digest("image", "qwen3_5", geometry, b"data") for geometry in other),
        digest("image", "qwen3_5", GEOMETRY, b"Data"),
        digest("image", "qwen3_5", GEOMETRY, b"data\0"),
        digest("image", "qwen3_5", GEOMETRY, b""),
    ]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {DIGEST_BYTES}


def test_parts_do_not_flow_into_each_other() -> None:
    cases = [("ab", "c", b""), ("a", "bc", b""), ("", "abc", b""), ("abc", "", b""), ("a", "b", b"c"), ("", "", b"abc")]
    names = [digest(kind, family, GEOMETRY, data) for kind, family, data in cases]
    assert all(a != b for a, b in combinations(names, 2))


def test_it_is_the_same_in_every_process() -> None:
    assert digest("image", "qwen3_5", GEOMETRY, b"data").hex() == (
        "932768178875dc97fd3db993402b7140b6c28e9a3c90c36f6b7c4de002fc118e"
    )
