"""The few fields of `tokenizer.model` that are read without sentencepiece, against its own protocol buffer."""

import re
from collections.abc import Callable

import pytest
from sentencepiece import sentencepiece_model_pb2

from runner.errors import ModelError
from runner.tokenizer.model_proto import PieceType, parse_model, without_dummy_prefix
from scripts.tools.models.tokenizers import trained_model, written_model

ModelProto = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]  # made while it is imported

NO_SPECS = b"\x12\x00\x1a\x00"
"""An empty trainer_spec and an empty normalizer_spec."""

MODELS: dict[str, Callable[[], bytes]] = {
    "bpe": lambda: trained_model(user_defined=("<a>", "▁▁"), control=("<c>",)),
    "unigram": lambda: trained_model("unigram", byte_fallback=False),
    "normalized": lambda: trained_model(normalization="nmt_nfkc", dummy_prefix=False),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_it_says_what_the_protocol_buffer_says(make: Callable[[], bytes]) -> None:
    data = make()
    read, wanted = parse_model(data), ModelProto.FromString(data)
    assert read.algorithm.lower() == {1: "unigram", 2: "bpe"}[wanted.trainer_spec.model_type]
    assert read.dummy_prefix is wanted.normalizer_spec.add_dummy_prefix
    assert read.marked == {
        index: (PieceType(piece.type), piece.piece) for index, piece in enumerate(wanted.pieces) if piece.type != 1
    }


def test_what_is_absent_has_the_defaults_of_the_format() -> None:
    model = ModelProto()
    model.pieces.add(piece="<unk>", score=0, type=2)
    assert parse_model(model.SerializeToString() + NO_SPECS)[:2] == ("unigram", True)


def test_pieces_are_told_whatever_fields_they_have() -> None:
    model = ModelProto()
    model.pieces.add(piece="no score")
    model.pieces.add(piece="typed", score=1, type=1)
    model.pieces.add(piece="x" * 200, score=1)
    model.pieces.add(piece="y" * 300, score=1, type=4)
    model.pieces.add(piece="twelve bytes", type=3)
    assert parse_model(model.SerializeToString() + NO_SPECS).marked == {
        3: (PieceType.USER_DEFINED, "y" * 300),
        4: (PieceType.CONTROL, "twelve bytes"),
    }


def test_a_piece_that_only_looks_ordinary_is_not_taken_for_one() -> None:
    """The type and an unknown field together are as long as a score; or the score comes first."""
    unknown = b"\x0a\x03<c>" + b"\x18\x03" + b"\x9a\x01\x00"
    score_first = b"\x15\x05\0\0\0" + b"\x0a\x03\x15c>" + b"\x18\x03"
    for piece, text in ((unknown, "<c>"), (score_first, "\x15c>")):
        marked = parse_model(b"\x0a" + bytes([len(piece)]) + piece + NO_SPECS).marked
        assert marked == {0: (PieceType.CONTROL, text)}


def test_the_prefix_is_switched_off_and_nothing_else() -> None:
    data = trained_model()
    wanted = ModelProto.FromString(data)
    wanted.normalizer_spec.add_dummy_prefix = False
    assert ModelProto.FromString(without_dummy_prefix(data)) == wanted
    assert parse_model(without_dummy_prefix(data)).dummy_prefix is False


def refused(data: bytes) -> None:
    text = f"parse tokenizer: tokenizer.model: not a sentencepiece model, or only a part of one ({len(data)} bytes)"
    with pytest.raises(ModelError, match=f"^{re.escape(text)}$"):
        parse_model(data)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10, 100, 1000, -1, -2, -100])
def test_a_file_that_was_cut_off_is_refused(size: int) -> None:
    refused(trained_model()[:size])


@pytest.mark.parametrize("missing", ["trainer_spec", "normalizer_spec", "pieces"])
def test_a_file_that_was_cut_off_between_two_parts_is_refused(missing: str) -> None:
    model = ModelProto.FromString(trained_model())
    model.ClearField(missing)
    refused(model.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [b"\0", b"{}", b"version https://git-lfs.github.com/spec/v1\n", b"\x0a\x02\x08\x01", b"\x0a\x80" + b"\x80" * 12],
)
def test_something_else_is_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize(("old", "new"), [(b"\x18\x02", b"\x18\x09"), (b"<unk>", b"<\xff\xff\xff>")])
def test_types_that_are_none_and_text_that_is_none_are_refused(old: bytes, new: bytes) -> None:
    data = written_model([("<unk>", "unknown")])
    assert old in data
    with pytest.raises(ModelError, match="not a sentencepiece model"):
        parse_model(data.replace(old, new))
