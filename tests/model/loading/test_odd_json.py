"""Odd JSON in the files of a model: each is served, or refused in one line that names the file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import json_files
from runner.errors import ModelError
from runner.model import open_model
from runner.tokenizer import open_tokenizer
from scripts.tools.models.checkpoints import write_checkpoint
from tests.model.loading.conftest import checked

ODD = "the odd value"
INDEX, WEIGHTS = "model.safetensors.index.json", "model-00001-of-00002.safetensors"


def lists(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def objects(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


DEEP = {
    f"{make.__name__} {depth} deep": make(depth) for make in (lists, objects) for depth in (200, 900, 5000, 100_000)
}
VALUES = {
    **DEEP,
    **{name: name.encode() for name in ("NaN", "Infinity", "1e999", "-1", "1.5", "true", "null", "[]", "{}", '"text"')},
    **{f"{digits} digits": b"1" * digits for digits in (400, 4000, 5000)},
}
PLACES = {
    "config.json": ("rope_scaling", "hidden_size", "unknown", ""),
    "generation_config.json": ("eos_token_id", "suppress_tokens", ""),
    "tokenizer_config.json": ("eos_token", ""),
    "special_tokens_map.json": ("eos_token", ""),
    "preprocessor_config.json": ("size", ""),
    "tokenizer.json": ("unknown", "added_tokens", "model", ""),
    INDEX: ("weight_map", "metadata", ""),
    WEIGHTS: ("__metadata__", "a.weight", ""),
}
"""The fields of each file that are odd; the empty one is all of it."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("odd") / "d", "llama", shards=2)


def with_field(whole: bytes, field: str, value: bytes) -> bytes:
    """Returns a JSON object with another value in a field, or this value alone."""
    if not field:
        return value
    others = {key: each for key, each in json.loads(whole or b"{}").items() if key != field}
    return json.dumps({**others, field: ODD}).encode().replace(json.dumps(ODD).encode(), value)


def with_header(whole: bytes, field: str, value: bytes) -> bytes:
    """Does that to the header of a safetensors file."""
    (length,) = struct.unpack("<Q", whole[:8])
    header = with_field(whole[8 : 8 + length], field, value)
    return struct.pack("<Q", len(header)) + header + whole[8 + length :]


def serve(directory: Path) -> str:
    """Opens the directory; returns its warnings, since the index is optional."""
    opened = open_model(str(directory), Path("unused"))
    open_tokenizer(opened.file, merge_eos=True)
    assert len(opened.suppressed_tokens) <= 1
    return "".join(opened.checkpoint.warnings)


@pytest.mark.parametrize("kind", VALUES)
def test_odd_parts_of_an_added_token_are_left_out_or_refused(
    kind: str, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads((directory / "tokenizer.json").read_text())
    token = {"id": 5, "content": "odd", "unknown": ODD}  # without its flags, which are put in
    data = json.dumps({**whole, "added_tokens": [token]}).encode().replace(json.dumps(ODD).encode(), VALUES[kind])
    refusal = "tokenizer.json"
    try:
        open_tokenizer({"tokenizer.json": data}.get)
    except ModelError as error:
        refusal = str(error)
    assert "tokenizer.json" in refusal
    capfd.readouterr()


@pytest.mark.parametrize("name", PLACES)
def test_a_file_is_served_or_refused_by_its_name(name: str, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = directory / name
    whole = path.read_bytes() if path.exists() else None
    change: Callable[[bytes, str, bytes], bytes] = with_header if name == WEIGHTS else with_field
    try:
        for field in PLACES[name]:
            for kind, value in VALUES.items():
                path.write_bytes(change(whole or b"", field, value))
                try:
                    refusal = serve(directory)
                except ModelError as error:
                    refusal = str(error)
                assert not refusal or name in refusal or "config.json" in refusal, f"{field} {kind}: {refusal}"
                assert kind not in DEEP or refusal or name == "preprocessor_config.json", f"{field}: {kind}"
                if kind in ("lists 900 deep", "5000 digits"):
                    found = checked(directory)
                    told = found.warnings if name == INDEX else found.problems
                    assert not refusal or told, f"{field} {kind}"
    finally:
        path.unlink()
        if whole is not None:
            path.write_bytes(whole)
    capfd.readouterr()  # the tokenizers library tells of its panics itself


def test_the_deepest_value_that_is_read_can_be_copied_and_printed() -> None:
    assert json_files.parse(lists(100)) == json.loads(lists(100))
    for data in (lists(101), objects(101), lists(100_000)):
        with pytest.raises(ValueError, match="nested deeper than 100"):
            json_files.parse(data)
