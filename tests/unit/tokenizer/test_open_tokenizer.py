"""The choice of the tokenizer's file, and the messages for unreadable files."""

import json
import logging

import pytest

from runner.errors import ModelError
from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import byte_level, trained_model


def test_a_tokenizer_json_comes_first() -> None:
    files = {"tokenizer.json": json.dumps(byte_level()).encode(), "tokenizer.model": trained_model()}
    assert open_tokenizer(files.get).file == "tokenizer.json"
    del files["tokenizer.json"]
    assert open_tokenizer(files.get).file == "tokenizer.model"


# Broken files


def load(model: bytes) -> None:
    open_tokenizer({"tokenizer.model": model}.get)


def test_a_piece_that_is_not_utf8_is_refused() -> None:
    broken = trained_model().replace("日本語".encode(), b"\xff" * 9)
    with pytest.raises(ModelError, match=r"^parse tokenizer: tokenizer\.model: a piece is not UTF-8: "):
        load(broken)


@pytest.mark.parametrize("data", [b"IQ== 0\nIg== 1\n", b"aGVsbG8= 0\r\n"])
def test_a_tiktoken_file_of_that_name_is_told_from_a_broken_one(data: bytes) -> None:
    with pytest.raises(ModelError, match=r"^parse tokenizer: tokenizer\.model: a tiktoken file; transformers' Auto"):
        load(data)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["vocab.json", "merges.txt"], "vocab.json and merges.txt"),
        (["spiece.model"], "spiece.model"),
        (["tekken.json"], "tekken.json"),
    ],
)
def test_a_directory_with_another_form_of_tokenizer_gets_advice(names: list[str], found: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_tokenizer(dict.fromkeys(names, b"").get, merge_eos=True)
    assert str(caught.value) == (
        f"load tokenizer config: no tokenizer.json and no tokenizer.model in the directory; there is {found}: "
        "transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes a tokenizer.json"
    )


@pytest.mark.parametrize("names", [[], ["vocab.json"]])
def test_a_directory_without_any_tokenizer_is_told_so(names: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        open_tokenizer(dict.fromkeys(names, b"").get, merge_eos=True)
    assert str(caught.value) == "load tokenizer config: no tokenizer.json and no tokenizer.model in the directory"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("special_tokens_map.json", b"version https://git-lfs", "Expecting value"),
        ("special_tokens_map.json", b"[]", "expected an object, found list"),
        ("added_tokens.json", b"7", "expected an object, found int"),
        ("added_tokens.json", b'{"<a>": -1}', "-1 is not a token id"),
    ],
)
def test_a_broken_file_that_the_models_own_program_never_reads_is_told_and_passed_over(
    name: str, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ollama reads neither; transformers does, unless there is a newer table."""
    files = {"tokenizer.json": json.dumps(byte_level()).encode(), name: data}
    with caplog.at_level(logging.WARNING):
        assert open_tokenizer(files.get).kind == "BPE"
    assert reason in str(caplog.records[-1].__dict__["attributes"]["reason"])
    with pytest.raises(ModelError, match=rf"^parse tokenizer: {name}: .*{reason}"):
        open_tokenizer(files.get, merge_eos=True)
    files["tokenizer_config.json"] = b'{"added_tokens_decoder": {}}'
    assert open_tokenizer(files.get, merge_eos=True).kind == "BPE"
    assert len(caplog.records) == 2
