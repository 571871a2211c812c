"""Nothing that a file or an entry of the directory can hold ends the disk thread, or is taken for what was written."""

import contextlib
import json
import os
import socket
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from runner.disk.segment import SEAL_BYTES, STATE, Record, Segment, SegmentFacts, Tensor, sealed
from runner.disk.segment_reader import FoundSegment, Wanted
from runner.disk.thread import Reading
from tests.unit.disk.made import LAYERS, segment
from tests.unit.disk.test_thread import TOKENS, Thread

Change = Callable[[Random, Path], None]

KEPT = [segment(TOKENS, start, start + 256) for start in (0, 256, 512)]
STATES = [segment(TOKENS, at - 1, at, STATE) for at in (512, 768)]
PROMPTS = {
    "the same": TOKENS[:769],
    "parts within": [*TOKENS[:650], *range(40)],
    "parts early": [*TOKENS[:300], *range(40)],
    "goes on": [*TOKENS[:768], *range(300)],
}


def asked(thread: Thread, tokens: list[int]) -> list[FoundSegment]:
    """Returns what is read for a prompt; the thread must come to rest."""
    taken: list[FoundSegment | None] = []
    reading = Reading(Wanted(array("i", tokens), "", 0, lambda at: at - 1, LAYERS), taken.append)
    reading.credit = 99
    thread.look_for(reading)
    thread.rest()
    assert taken.pop() is None
    return [found for found in taken if found is not None]


def check(directory: Path, written: list[Segment], change: Change, numbers: Random) -> int:
    """Writes segments, changes one, and asks all prompts in any order. Returns how many segments were found."""
    first = Thread(directory)
    first.put(*written)
    victim = first.store.folder / numbers.choice(written).name.file
    change(numbers, victim)
    thread, right, count = Thread(directory), {each.name: each for each in written}, 0
    for prompt in numbers.sample([*PROMPTS.values()], len(PROMPTS)):
        for found in asked(thread, prompt):
            count += 1
            expected = right[found.segment.name]
            assert found.segment.facts.records == expected.facts.records
            assert bytes(found.segment.data) == bytes(expected.data)
            if expected.facts.tokens:
                assert found.prefix == array("i", TOKENS[: expected.name.stop])
    assert not thread.fault
    assert thread.put(segment(TOKENS[::-1], 0, 200)) == [True]  # it goes on
    return count


def flip(numbers: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    tokens, rest, seal = (header, header + 1024), (header, len(data)), (len(data) - SEAL_BYTES, len(data))
    part = numbers.choice([(0, 8), (8, header), tokens, tokens, tokens, rest, seal])
    data[min(numbers.randrange(*part), len(data) - 1)] ^= 1 << numbers.choice((numbers.randrange(8), 7))
    path.write_bytes(data)


@pytest.mark.parametrize("written", [KEPT, [*KEPT, *STATES]], ids=["entries", "states"])
def test_any_flipped_bit_is_a_miss(written: list[Segment], tmp_path: Path) -> None:
    numbers = Random(len(written))
    found = [check(tmp_path / str(count), written, flip, numbers) for count in range(60)]
    assert sum(found) > 200  # the others are whole


def reseal(path: Path, change: Callable[[SegmentFacts], SegmentFacts], data: bytes = b"") -> None:
    """Changes the facts of a file, and computes its sums anew; over other data, if they are given."""
    file = path.read_bytes()
    at = 8 + int.from_bytes(file[:8], "little")
    facts = msgspec.json.decode(json.loads(file[8:at])["__metadata__"]["segment"], type=SegmentFacts)
    path.write_bytes(b"".join(sealed(Segment(change(facts), memoryview(data or file[at:-SEAL_BYTES])))))


def records(change: Callable[[Record], object]) -> Callable[[SegmentFacts], SegmentFacts]:
    """Returns a change of all records; one that returns no record replaces them."""

    def changed(facts: SegmentFacts) -> SegmentFacts:
        found = [change(record) for record in facts.records]
        return replace(facts, records=tuple(each for each in found if isinstance(each, Record)))

    return changed


def tensors(change: Callable[[Tensor], Tensor]) -> Callable[[SegmentFacts], SegmentFacts]:
    return records(lambda record: replace(record, tensors=tuple(map(change, record.tensors))))


OTHER_TYPES = {"F32": "I32", "U32": "I32", "BF16": "F16"}
FIELDS: dict[str, Callable[[SegmentFacts], SegmentFacts]] = {
    "types": tensors(lambda tensor: replace(tensor, dtype=OTHER_TYPES[tensor.dtype])),
    "axes": tensors(lambda tensor: replace(tensor, shape=tensor.shape[::-1])),
    "widths": tensors(
        lambda tensor: replace(tensor, shape=(*tensor.shape[:-2], tensor.shape[-2] * 2, tensor.shape[-1] // 2))
    ),
    "one axis more": tensors(lambda tensor: replace(tensor, shape=(1, *tensor.shape))),
    "no axis": tensors(lambda tensor: replace(tensor, shape=())),
    "negative": tensors(lambda tensor: replace(tensor, shape=(-1, -1, *tensor.shape[1:]))),
    "larger than a disk": tensors(lambda tensor: replace(tensor, shape=(1 << 62, 1 << 62))),
    "no tensors": records(lambda record: replace(record, tensors=())),
    "no records": records(lambda _: None),
    "twice": lambda facts: replace(facts, records=facts.records * 2),
    "another layer": records(lambda record: replace(record, slot=1 - record.slot)),
    "no layer": records(lambda record: replace(record, slot=-1)),
    "starts later": records(lambda record: replace(record, start=record.start + 1)),
    "starts before all": records(lambda record: replace(record, start=-9)),
    "no tree": records(lambda record: replace(record, content="[" * 100_000)),
    "another tree": records(lambda record: replace(record, content='["l",[["a",-1]]]')),
    "other classes": lambda facts: replace(facts, layers={"0": "B", "1": "A"}),
    "fewer layers": lambda facts: replace(facts, layers={"0": "A"}),
    "more layers": lambda facts: replace(facts, layers={**facts.layers, "00": "A"}),
    "layers without a number": lambda facts: replace(facts, layers={"A": "0"}),
    "another place": lambda facts: replace(facts, name=facts.name._replace(start=facts.name.start + 1)),
    "another model": lambda facts: replace(facts, namespace="v2"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_with_right_sums_that_is_of_other_layers_is_removed(field: str, tmp_path: Path) -> None:
    for kept in (KEPT[0], STATES[1]):
        first = Thread(tmp_path / kept.name.kind)
        first.put(*KEPT, *STATES)
        victim = first.store.folder / kept.name.file
        reseal(victim, FIELDS[field])
        thread = Thread(tmp_path / kept.name.kind)
        for prompt in PROMPTS.values():
            assert kept.name not in [found.segment.name for found in asked(thread, prompt)]
        assert not victim.exists()
        assert thread.store.rejected.total() == 1
        assert thread.put(kept) == [True]


def test_tokens_that_are_not_those_of_the_name_are_refused_though_their_sum_is_right(tmp_path: Path) -> None:
    """Behind the end of the prompt, too: they would be found by another."""
    for place, pictures in ((0, ()), (100, ("no digest",)), (255, ("00",))):
        first = Thread(tmp_path / str(place))
        first.put(*KEPT)
        victim = first.store.folder / KEPT[2].name.file
        data = bytearray(KEPT[2].data)
        data[4 * place] ^= 1
        reseal(victim, lambda facts, pictures=pictures: replace(facts, pictures=pictures), bytes(data))  # type: ignore[misc]
        thread = Thread(tmp_path / str(place))
        assert len(asked(thread, TOKENS[:560])) == 2
        assert thread.store.rejected == {"tokens": 1}
        assert not victim.exists()


def pipe(_: Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def listener(_: Random, path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def folder(_: Random, path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "letter.txt").write_text("mine")


def link(numbers: Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(numbers.choice([path, path.parent, path.parent / "about.json", Path("/dev/zero")]))


def hole(_: Random, path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 30)


def another(_: Random, path: Path) -> None:
    path.write_bytes(next(other for other in path.parent.glob("*.kv") if other != path).read_bytes())


ENTRIES_OF_A_DIRECTORY: list[Change] = [pipe, listener, folder, link, hole, another, lambda _, path: path.unlink()]


@pytest.mark.parametrize("change", ENTRIES_OF_A_DIRECTORY)
def test_what_is_no_file_of_ours_is_a_miss_and_keeps_nothing_from_being_written(change: Change, tmp_path: Path) -> None:
    for seed in range(4):
        directory = tmp_path / str(seed)
        check(directory, [*KEPT, *STATES], change, Random(seed))
        thread = Thread(directory)
        assert thread.put(*KEPT, *STATES) == [True] * 5
        assert (thread.store.write_errors, thread.store.may_write) == (0, True)
        read = sum(len(each.data) for each in (*KEPT, *STATES))
        if change is not folder:
            assert [bytes(found.segment.data) for found in asked(thread, PROMPTS["the same"])][:3] == [
                bytes(each.data) for each in KEPT
            ]
            assert thread.store.read_bytes <= read


def flip_sign(_: Random, path: Path) -> None:
    """Of the first token: a picture that the segment does not have."""
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 3] ^= 0x80
    path.write_bytes(data)


def test_a_token_that_is_wrong_is_found_by_a_prompt_that_parts_within_its_segment(tmp_path: Path) -> None:
    first = Thread(tmp_path)
    first.put(*KEPT)
    victim = first.store.folder / KEPT[2].name.file
    flip_sign(Random(1), victim)
    thread = Thread(tmp_path)
    assert [found.segment.name for found in asked(thread, PROMPTS["parts within"])] == [each.name for each in KEPT[:2]]
    assert thread.store.rejected == {"tokens": 1}
    assert not victim.exists()


@pytest.mark.parametrize("change", ENTRIES_OF_A_DIRECTORY[:3])
def test_what_becomes_no_file_after_the_listing_is_a_miss(change: Change, tmp_path: Path) -> None:
    thread = Thread(tmp_path)
    thread.put(*KEPT)
    change(Random(1), thread.store.folder / KEPT[0].name.file)
    assert asked(thread, PROMPTS["the same"]) == []
    assert thread.put(KEPT[0]) == [True]


def test_a_hole_is_not_read(tmp_path: Path) -> None:
    """A file of a gibibyte whose header is right, and one whose header says so."""
    first = Thread(tmp_path)
    first.put(*KEPT)
    for kept, size in zip(KEPT, (1 << 30, 1 << 30, 8), strict=True):
        os.truncate(first.store.folder / kept.name.file, size)
    thread = Thread(tmp_path)
    assert asked(thread, PROMPTS["the same"]) == []
    assert thread.store.read_bytes == 0
    assert thread.store.rejected == {"crc": 2, "torn": 1}
