"""A file is the segment that was written, or it is refused."""

import json
from contextlib import nullcontext
from random import Random

import pytest
from msgspec import structs

from runner.disk.segment import (
    SEAL_BYTES,
    STATE,
    Form,
    Name,
    Segment,
    SegmentError,
    Tensor,
    checked,
    compare,
    header_bytes,
    parse_name,
    read_facts,
    sealed,
)
from tests.unit.disk.made import LAYERS, NAMESPACE, named, segment

TOKENS = list(range(40))
WHOLE = segment(TOKENS, 3, 33)


def written(of: Segment = WHOLE) -> bytearray:
    return bytearray(b"".join(sealed(of)))


def read(data: bytes | bytearray, name: Name = WHOLE.name, namespace: str = NAMESPACE) -> Segment:
    at = 8 + header_bytes(bytes(data[:8]), len(data))
    facts = read_facts(bytes(data[8:at]), bytes(data[-SEAL_BYTES:]), name, namespace, len(data))
    return checked(facts, memoryview(data)[at:-SEAL_BYTES])


@pytest.mark.parametrize("of", [WHOLE, segment(TOKENS, 32, 33, STATE)], ids=["entries", "state"])
def test_what_is_written_is_read(of: Segment) -> None:
    data = written(of)
    found = read(data, of.name)
    assert found.facts.records == of.facts.records
    assert bytes(found.data) == bytes(of.data)
    assert found.tokens == of.tokens
    assert found.spans(0) == of.spans(0)


def test_any_tool_can_look_into_it() -> None:
    data = written()
    count = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + count])
    ends = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert 8 + count + ends[-1][1] == len(data)
    assert count % 8 == 0
    assert all(isinstance(value, str) for value in header["__metadata__"].values())


@pytest.mark.parametrize("seed", range(8))
def test_no_flipped_bit_passes(seed: int) -> None:
    """160 places a seed: the length, the header, each tensor, the seal."""
    numbers, data = Random(seed), written()
    for place in [*range(8), len(data) - 1, *(numbers.randrange(len(data)) for _ in range(151))]:
        data[place] ^= (bit := 1 << numbers.randrange(8))
        with pytest.raises(SegmentError):
            read(data)
        data[place] ^= bit
    read(data)


@pytest.mark.parametrize("change", ["cut", "insert", "zeros", "more"])
def test_no_other_length_passes(change: str) -> None:
    whole, numbers = written(), Random(change)
    for at in [0, 4, 8, 9, len(whole) - 17, len(whole) - 1, *(numbers.randrange(len(whole)) for _ in range(40))]:
        changed = {
            "cut": whole[:at],
            "insert": whole[:at] + b"\0" + whole[at:],
            "zeros": bytearray(len(whole)),
            "more": whole + bytes(at + 1),
        }[change]
        with pytest.raises(SegmentError):
            read(changed)


def test_a_file_under_the_name_of_another_is_refused() -> None:
    other = segment([*TOKENS[:32], 77, 5], 3, 33)
    with pytest.raises(SegmentError, match="tokens"):
        read(written(other))
    with pytest.raises(SegmentError, match="tokens"):
        read(written(), namespace=NAMESPACE.replace("0", "1"))


def test_names_carry_everything() -> None:
    for name in (WHOLE.name, named(TOKENS, 8, 9, STATE)):
        assert parse_name(name.file) == name
    file = WHOLE.name.file
    for wrong in ("about.json", file + ".tmp", file.replace("kv", "state"), file.replace(".3-33", ".33-3"), f"x{file}"):
        assert parse_name(wrong) is None
    assert parse_name(file.replace(".3-", ".03-")) is None  # no two files of one segment


@pytest.mark.parametrize(
    ("dtype", "shape", "fits"),
    [
        ("F32", (1, 16, 8), True),
        ("F32", (1, 41, 8), True),
        ("F32", (3, 16, 8), True),
        ("F32", (3, 41, 8), False),
        ("F16", (1, 16, 8), False),
        ("F32", (1, 16), False),
    ],
)
def test_a_state_may_be_longer_on_one_axis(dtype: str, shape: tuple[int, ...], fits: bool) -> None:
    content = '["l",[["a",0]]]'
    facts = segment(TOKENS, 3, 33, STATE).facts
    record = structs.replace(facts.records[0], tensors=(Tensor(dtype, shape),), content=content)
    form = Form(STATE, "B", (Tensor("F32", (1, 16, 8)),), content, grows=True)
    with nullcontext() if fits else pytest.raises(SegmentError, match="layers"):
        compare(structs.replace(facts, records=(record,)), {**LAYERS, "1": form})
